"""`docs/add_your_data.md`, followed as a stranger would: its code and its command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from configs import build_config
from tiny import save_llama, save_tokenizer

from data.mixture import MixtureUnit
from training.ranks import Ranks
from training.run import inspect_data
from training.train_files import parse_files

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "add_your_data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_own_records_and_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (code,), command = blocks("python"), blocks("bash")[-1]
    (tmp_path / "my_data.py").write_text(code)
    (tmp_path / "quiz.txt").write_text("Legs of a spider?\neight\nLegs of a bee?\nsix\nAnd a snake?\n\n")
    save_llama(tmp_path / "model", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    overrides = [argument for argument in shlex.split(command) if "=" in argument]
    assert len(overrides) == 3
    config = build_config("model_name_or_path=model", "output_dir=out", "data.on_bad_record=skip", *overrides)
    inspect_data(config, Ranks(0, 1, 0, 1))
    told = capsys.readouterr().out
    assert "Question: Legs of a spider? A:[[ eight</s>]]" in told and "Question: Legs of a bee? A:[[ six</s>]]" in told
    assert "skipped: my_data.read_quiz: record 3: no answer; mend or remove it" in told


@pytest.mark.parametrize("override", [line.split("' ")[0].strip("'") for line in blocks("bash")[1].splitlines()])
def test_mixtures_are_read(override: str) -> None:
    files = parse_files(build_config(override).train_file, "train_file", MixtureUnit.SAMPLES)
    assert len(files.entries) == 2 and files.mixture is not None and files.mixture.shares in ((3, 1), (2, 0.5))
