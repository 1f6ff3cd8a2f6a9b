"""The interface of what takes the exports of a run, such as an upload: `Extension.receiver` names a class of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from extension import load_extensions, load_part
from training.checkpoint.run_folder import RunFolder
from training.config.schema import RunConfig


class ExportReceiver:
    """Takes exports, on the main rank alone. The class methods say what a config asks for, on every rank."""

    name = ""  # for messages: the extension's

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Check what can be checked first of all, before a base model is downloaded. Raises UserError."""

    @classmethod
    def open(cls, config: RunConfig, run: RunFolder) -> ExportReceiver | None:
        """Return the receiver of a run that is about to train; None where the config asks for none. Raises
        UserError."""
        raise NotImplementedError

    @classmethod
    def is_due(cls, config: RunConfig, step: int) -> bool:
        """Return whether the model of this step is taken while the run continues: it is saved, and exported to `hf/`,
        for that."""
        return False

    @classmethod
    def takes_steps(cls, config: RunConfig) -> bool:
        """Return whether `is_due` holds for some step."""
        return False

    @property
    def is_busy(self) -> bool:
        """Whether an earlier export is still being taken: a step that is due then is left out."""
        raise NotImplementedError

    def start(self, folder: Path, message: str) -> None:
        """Take `folder`, an export of the run, which does not change until `wait` has returned. A failure ends
        nothing. message: a few words on what it is."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when the last export has been taken."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Say how the last export can be taken later: a signal ends the process before it has been."""
        raise NotImplementedError


@cache
def list_receivers() -> tuple[type[ExportReceiver], ...]:
    """Return the receivers of extensions."""
    return tuple(load_part(extension.receiver) for extension in load_extensions() if extension.receiver)


def check_receivers(config: RunConfig) -> tuple[type[ExportReceiver], ...]:
    """Return the receivers of extensions, which have checked what a config asks of them. Raises UserError."""
    for receiver in list_receivers():
        receiver.check(config)
    return list_receivers()


def is_taken(config: RunConfig, step: int) -> bool:
    """Return whether a receiver takes the model of this step while the run continues."""
    return any(receiver.is_due(config, step) for receiver in list_receivers())


def takes_steps(config: RunConfig) -> bool:
    """Return whether a receiver takes the model of any step while the run continues."""
    return any(receiver.takes_steps(config) for receiver in list_receivers())
