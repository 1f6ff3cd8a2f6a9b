"""The schema of a run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from support.configs import REQUIRED, build_config, compose_config
from support.launching import ROOT

from data.options import LengthPolicy, MixtureUnit, OnBadRecord, PadTo
from errors import UserError
from extensions.preferences.keys import DPOLossType
from training.config.schema import find_default, to_typed

SLOW = {"torch", "transformers", "deepspeed", "datasets"}


def test_a_command_line_does_not_wait_for_torch() -> None:
    """`--help` and a mistyped key get an immediate answer."""
    code = "import sys; import training.entry, extensions.sweep.sweep; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not SLOW & set(imported.split())


def test_choices_of_the_data_and_of_a_loss_are_written_as_their_owners_name_them() -> None:
    config = build_config(
        "data.length_policy=drop",
        "data.on_bad_record=skip",
        "data.mixture_by=tokens",
        "data.pad_to=max_seq_length",
        "dpo.loss_type=ipo",
    )
    data = config.data
    assert (data.length_policy, data.on_bad_record) == (LengthPolicy.drop, OnBadRecord.skip)
    assert (data.mixture_by, data.pad_to) == (MixtureUnit.tokens, PadTo.max_seq_length)
    assert config.dpo.loss_type is DPOLossType.ipo


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("inspect_data=true", "proof=true"), "inspect_data=true and proof=true"),
        (("plan=true", "proof=true"), "proof=true and plan=true"),
        (("plan=search", "inspect_data=true"), "inspect_data=true and plan=search"),
    ],
)
def test_two_keys_that_run_something_in_place_of_training_are_refused(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(UserError, match=f"{named}: each runs in place of training; give one of them"):
        to_typed(compose_config("base", *REQUIRED, *words))


def test_a_choice_without_a_file_has_the_defaults_of_the_usual_one() -> None:
    """Such as a kind of data that a user's code has added to the table."""
    config = build_config("data=classification")
    assert find_default(config, "data.label_field") == "label"
    added = replace(config, data=replace(config.data, name="added"))
    assert find_default(added, "data.label_field") is find_default(build_config(), "data.label_field") is None
