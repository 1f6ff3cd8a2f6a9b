"""Uploads the model of a run to the Hugging Face hub, with a model card. Main rank only.

The token is HF_TOKEN of the environment, or that of `hf auth login`: it is in no config, log or file of a run.
`huggingface_hub` skips what the repository already holds, so an upload that broke off is continued by starting it
again.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

from console import report_progress, say
from errors import UserError
from extensions.hub.keys import HubConfig
from extensions.hub.model_card import find_base, find_license, write_card
from masking import print_exception
from training.checkpoint.run_folder import RunFolder
from training.config.schema import RunConfig
from training.export_receiver import ExportReceiver

_SECONDS_BETWEEN_SIGNS = 5.0  # of an upload that lasts
_UNKNOWN_TOKEN = (401, 403)  # answers of the hub


def check_upload(repo_id: str) -> None:
    """Check the name and the token of uploads: a run does so first of all, before a base model is downloaded. Raises
    UserError for a wrong name, without a token, and for one that the hub does not know or that may not write."""
    from huggingface_hub import HfApi  # here: most runs upload nothing
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=_find_token(repo_id))
    try:
        told = api.whoami().get("auth", {}).get("accessToken", {})
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in _UNKNOWN_TOKEN:
            raise _refuse(repo_id, error) from None
        return  # it answers this question seldom (429), or not at all: creating the repository will tell
    except Exception as error:  # of its HTTP library, of the network
        raise _refuse(repo_id, error) from None
    if told.get("role") == "read":
        raise _miss_token(repo_id)


def _find_token(repo_id: str) -> str:
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
        is_name = "/" in repo_id
    except HFValidationError:
        is_name = False
    if not is_name:
        raise UserError(f"hub.repo_id={repo_id}: give org/name, or your own name and that of the model")
    token = get_token()  # HF_TOKEN, or that of `hf auth login`
    if not token:
        raise _miss_token(repo_id)
    return token


def _miss_token(repo_id: str) -> UserError:
    return UserError(
        f"hub.repo_id={repo_id}: set HF_TOKEN in the environment to a token that may write there, or use hf auth login"
    )


def _refuse(repo_id: str, error: Exception) -> UserError:
    return UserError(
        f"hub.repo_id={repo_id}: no upload would be possible ({describe_error(error)}); check HF_TOKEN, the name and "
        "the network, or give hub.repo_id=null and upload later with extensions.hub"
    )


class Repository:
    """A model repository of the hub."""

    def __init__(self, repo_id: str, private: bool) -> None:
        """Create the repository if it does not exist yet. private: of a new one.

        Raises UserError for a wrong name, without a token, and where the hub refuses it or does not answer.
        """
        from huggingface_hub import HfApi

        self.repo_id, self._api = repo_id, HfApi(token=_find_token(repo_id))
        try:
            self._api.create_repo(repo_id, private=private, exist_ok=True)
        except Exception as error:
            raise _refuse(repo_id, error) from None

    def upload(self, run: RunFolder, folder: Path, message: str) -> str:
        """Write the model card of a run into `folder`, one of its exports, and upload all files of it. Returns where
        they are. Raises the exceptions of `huggingface_hub` and of its HTTP library."""
        write_card(run, folder, self.repo_id, self._find_license(run))
        self._api.upload_folder(repo_id=self.repo_id, folder_path=folder, commit_message=message)
        return f"{self._api.endpoint}/{self.repo_id}"

    def _find_license(self, run: RunFolder) -> str | None:
        """Return the licence that the model card of the base states: of its folder, else of its repository."""
        base = find_base(run)
        if base is None or Path(base).exists():
            return find_license(Path(base)) if base else None
        try:
            fields = self._api.model_info(base).card_data
        except Exception:  # the hub does not have it, or does not answer: the model card says that it is not known
            return None
        return fields.get("license") if fields is not None else None


class Uploader(ExportReceiver):
    """Uploads the exports of a run while it trains, one at a time, in a thread. A failure is printed and ends
    nothing."""

    name = "hub"

    def __init__(self, repository: Repository, run: RunFolder) -> None:
        self._repository, self._run = repository, run
        self._thread: threading.Thread | None = None
        self._message = ""  # what is being uploaded

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise UserError as `check_upload` does."""
        if (repo_id := config.read_group(HubConfig).repo_id) is not None:
            check_upload(repo_id)

    @classmethod
    def open(cls, config: RunConfig, run: RunFolder) -> Uploader | None:
        """Return the uploader of `hub.repo_id`, None without one. Raises UserError as `Repository` does: before a run
        trains, not when it has ended."""
        hub = config.read_group(HubConfig)
        return None if hub.repo_id is None else cls(Repository(hub.repo_id, hub.private), run)

    @classmethod
    def is_due(cls, config: RunConfig, step: int) -> bool:
        return config.read_group(HubConfig).is_due(step)

    @classmethod
    def takes_steps(cls, config: RunConfig) -> bool:
        hub = config.read_group(HubConfig)
        return hub.repo_id is not None and hub.every is not None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, folder: Path, message: str) -> None:
        """Upload `folder`, an export of the run, which must not change meanwhile. Waits for the upload before."""
        self.wait()
        self._message = message
        self._thread = threading.Thread(target=self._upload, args=(folder, message), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last upload has ended: minutes or hours, in which no rank is stuck."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_SECONDS_BETWEEN_SIGNS)
            report_progress()

    def give_up(self) -> None:
        say(f"hub: {self._message} is not uploaded, since a signal ends this run, which has finished. {self._later}")

    @property
    def _later(self) -> str:
        return f"Later: python -m extensions.hub {self._run.path} --repo_id {self._repository.repo_id}"

    def _upload(self, folder: Path, message: str) -> None:
        try:
            say(f"hub: {message} is at {self._repository.upload(self._run, folder, message)}")
        except Exception as error:
            print_exception(error, sys.stdout)  # the rank's log
            say(f"hub: {message} could not be uploaded ({describe_error(error)}); the run continues. {self._later}")


def describe_error(error: Exception) -> str:
    """Return the first line of an error, without an address, in which a server may have put a signature."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {re.sub(r'https?://[^ ]*', 'the hub', line)}" if line else type(error).__name__
