"""Keys that a resume changes are named, and nothing else."""

from __future__ import annotations

from pathlib import Path

from support.configs import build_config

from training.config.changed_keys import list_changed_keys, write_config


def test_changed_keys_are_named_with_both_values(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    assert list_changed_keys(file, build_config()) == []
    file.write_text(write_config(build_config("learning_rate=0.005")))
    assert list_changed_keys(file, build_config("learning_rate=0.005", "resume=latest", "output_dir=other")) == []
    changed = list_changed_keys(file, build_config("learning_rate=0.004", "precision=fp32"))
    assert "learning_rate was 0.005, is 0.004" in changed and "precision was bf16, is fp32" in changed
    file.write_text(write_config(build_config("eval_file={x: a.jsonl}")))
    both = build_config("eval_file={x: a.jsonl, y: b.jsonl}")
    assert list_changed_keys(file, both) == ["eval_file.y was None, is b.jsonl"]
    assert list_changed_keys(file, build_config()) == ["eval_file was {'x': 'a.jsonl'}, is None"]
    for damaged in ("a: [", "- 1", "\0"):
        file.write_text(damaged)
        assert list_changed_keys(file, build_config()) == []
