"""The stations of a batch: the files that a line of the train file passes on its way to the loss of a plain run are
those of the table in docs/inside.md, in its order, and few frames are above a layer's forward pass."""

from __future__ import annotations

import json
import re

import pytest
from support.batch_trace import ROOT, Line, Trace, trace_run
from support.tiny import save_llama, save_tokenizer

LENGTH = 59  # of the rows; no dimension of the model
MOST_FRAMES = 11
RECORD = {"prompt": "What bends a river", "completion": "sandstone ledges, and forty quiet winters"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("stations")
    save_llama(folder / "model")
    tokenizer = save_tokenizer(folder / "model")
    (folder / "train.jsonl").write_text(json.dumps(RECORD) + "\n")
    ids = tokenizer(RECORD["completion"])["input_ids"][2:-2]  # what no merge with a neighbour changes
    arguments = [
        f"model_name_or_path={folder}/model", f"train_file={folder}/train.jsonl", f"output_dir={folder}/out",
        "num_stages=2", "micro_batch_size=1", "global_batch_size=1", f"max_seq_length={LENGTH}", "precision=fp32",
        "activation_checkpoint_interval=0", "max_steps=1", "data.pad_to=max_seq_length",
        f"data.cache_dir={folder}/cache", "save_final=false",
    ]  # fmt: skip
    return trace_run(Line(RECORD["completion"][4:-4], tuple(ids), LENGTH), arguments, folder, 2)


def read_table() -> list[str]:
    """Return the files of the table."""
    section = (ROOT / "docs" / "inside.md").read_text().split("## The stations of a batch\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_the_table_lists_the_files_that_a_line_passes(trace: Trace) -> None:
    assert trace.files == read_table(), "\n".join(f"{file}: {name}" for file, name in trace.functions)


def test_few_frames_are_above_a_layer(trace: Trace) -> None:
    deepest = max(trace.stacks, key=len)
    assert deepest[-1].startswith("trainer_base_ds_mp.py"), deepest  # the real entry
    assert len(deepest) <= MOST_FRAMES, "\n".join(deepest)
