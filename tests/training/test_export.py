"""The files next to the checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.adapters import build_lora
from support.configs import build_config
from support.tiny import find_tokenized, save_llama, save_tokenizer
from transformers import AutoConfig, AutoTokenizer

from data.sample import IGNORE_INDEX
from data.storage.tokenized import TokenizedDataset
from models.adapters.adapter import Adapter
from models.architecture.lookup import build_layers
from models.conversion.convert import convert_to_pipeline, export_hugging_face
from models.storage.folders import PROMPT_TEMPLATE
from models.weights.source import WeightSource
from models.weights.sources import open_weights
from scripts.generate import Generator, Prompt
from training.checkpoint.run_folder import RunFolder
from training.distributed.ranks import SINGLE_PROCESS
from training.export import prepare_folder
from training.resolution.architecture import complete_architecture
from training.resolution.target import Target
from training.setup import Run


def build_run(source: WeightSource, folder: RunFolder, adapter: Adapter | None = None) -> Run:
    setup: Any = SimpleNamespace(config=build_config(), source=source, architecture=source.config, adapter=adapter)
    return Run(SINGLE_PROCESS, folder, setup)


def test_a_model_stops_at_the_tokens_that_it_is_trained_to_stop_at(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    names = ("config.json", "generation_config.json")
    for file in (tmp_path / "hf" / name for name in names):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 3}))
    tokenizer, folder = AutoTokenizer.from_pretrained(tmp_path / "hf"), RunFolder(tmp_path / "out")
    source = open_weights(str(tmp_path / "hf"))
    prepare_folder(build_run(source, folder), tokenizer, stop_tokens=["<s>", "</s>"])
    for name in names:
        assert json.loads((folder.checkpoints / name).read_text())["eos_token_id"] == [3, tokenizer.eos_token_id, 1]


def test_a_resumed_model_stops_where_its_new_tokenizer_ends_and_other_files_stay(tmp_path: Path) -> None:
    """The exported model has to stop at the end token that it was trained with after the resume."""
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    tokenizer, folder = AutoTokenizer.from_pretrained(tmp_path / "hf"), RunFolder(tmp_path / "out")
    first = build_run(open_weights(str(tmp_path / "hf")), folder)
    prepare_folder(first, tokenizer)
    files = [folder.checkpoints / name for name in ("config.json", "generation_config.json")]
    before = [(file.stat().st_ino, json.loads(file.read_text())) for file in files]
    source: Any = SimpleNamespace(path=folder.checkpoints, config=first.setup.architecture)
    resumed = build_run(source, folder)
    prepare_folder(resumed, tokenizer)
    assert [(file.stat().st_ino, json.loads(file.read_text())) for file in files] == before
    old, tokenizer.eos_token = tokenizer.eos_token_id, "<s>"
    prepare_folder(resumed, tokenizer)
    assert old != tokenizer.eos_token_id
    for file, (_, fields) in zip(files, before, strict=True):
        assert json.loads(file.read_text()) == fields | {"eos_token_id": [old, tokenizer.eos_token_id]}


@pytest.mark.parametrize("is_adapter", [False, True])
def test_files_that_all_checkpoints_share_are_replaced_whole_and_only_when_they_differ(
    is_adapter: bool, tmp_path: Path
) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    tokenizer, folder = AutoTokenizer.from_pretrained(tmp_path / "hf"), RunFolder(tmp_path / "out")
    source = open_weights(str(tmp_path / "hf"))
    adapter = build_lora(build_layers(source.config)) if is_adapter else None
    run = build_run(source, folder, adapter)
    prepare_folder(run, tokenizer)
    files = {file.name: file for file in folder.checkpoints.iterdir()}
    assert {"tokenizer.json", "config.json"} <= set(files) and ("adapter_config.json" in files) == is_adapter
    places = {name: (file.stat().st_ino, file.stat().st_mtime_ns) for name, file in files.items()}
    prepare_folder(run, tokenizer)
    assert {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.checkpoints.iterdir()} == places
    before = {name: file.read_bytes() for name, file in files.items()}
    for name, file in files.items():
        os.link(file, tmp_path / name)
        file.write_text("half")  # through the link too
    prepare_folder(run, tokenizer)
    for name, content in before.items():
        assert files[name].read_bytes() == content
        assert (tmp_path / name).read_text() == "half"  # another file has taken its name
    assert set(files) == {file.name for file in folder.checkpoints.iterdir()}


SMALL = ("tekken.json", "emoji.json", "preprocessor_config.json", "LICENSE", "additional_chat_templates/tool_use.jinja")


def test_every_small_file_of_the_source_is_next_to_the_checkpoints(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    (tmp_path / "hf/additional_chat_templates").mkdir()
    for name in (*SMALL, "README.md", "optimizer.pt", "pytorch_model.bin.index.json", "modeling_x.py"):
        (tmp_path / "hf" / name).write_text(name)
    _prepare(tmp_path / "hf", tmp_path / "out")
    checkpoints = tmp_path / "out/checkpoints"
    assert all((checkpoints / name).read_text() == name for name in SMALL)
    assert not any((checkpoints / name).exists() for name in ("README.md", "optimizer.pt", "modeling_x.py"))
    _prepare(tmp_path / "hf", tmp_path / "other", f"tokenizer_name_or_path={tmp_path / 'hf'}")
    others = {file.name for file in (tmp_path / "other/checkpoints").iterdir()}
    assert {"LICENSE", "preprocessor_config.json"} <= others and not {"tekken.json", "emoji.json"} & others
    convert_to_pipeline(open_weights(str(tmp_path / "hf")), tmp_path / "pipeline")
    export_hugging_face(open_weights(str(tmp_path / "pipeline")), tmp_path / "back")
    assert all((tmp_path / "back" / name).read_text() == name for name in SMALL)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _prepare(source_dir: Path, output: Path, *overrides: str) -> dict[str, Any]:
    """Returns the content of config.json next to the checkpoints."""
    source = open_weights(str(source_dir))
    architecture = complete_architecture(config := build_config(*overrides), source, Target(1, has_accelerator=False))
    setup: Any = SimpleNamespace(config=config, source=source, architecture=architecture, adapter=None)
    folder = RunFolder(output)
    prepare_folder(Run(SINGLE_PROCESS, folder, setup), AutoTokenizer.from_pretrained(source_dir))
    return json.loads((folder.checkpoints / "config.json").read_text())


def test_config_json_keeps_the_fields_of_the_source_under_the_names_of_transformers_4_and_5(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    fields = json.loads(file.read_text())
    for key in ("rope_parameters", "dtype"):
        fields.pop(key)
    own = {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE, "torch_dtype": "float32", "a_field_of_another_tool": [1]}
    file.write_text(json.dumps(fields | own))
    written = _prepare(tmp_path / "hf", tmp_path / "out")
    assert own.items() <= written.items() and fields.items() <= written.items()
    assert written["rope_parameters"] == {**LLAMA3_ROPE, "rope_theta": 5e5} and written["dtype"] == "float32"
    assert AutoConfig.from_pretrained(tmp_path / "out/checkpoints").rope_parameters == written["rope_parameters"]


def test_rotary_positions_of_the_run_are_written_under_the_names_of_transformers_4_and_5(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5})
    save_tokenizer(tmp_path / "hf")
    kept = _prepare(tmp_path / "hf", tmp_path / "kept")
    assert kept["rope_theta"] == 5e5
    assert kept["rope_scaling"] == LLAMA3_ROPE
    (tmp_path / "hf/config.json").write_text(json.dumps(kept))
    stretched = _prepare(
        tmp_path / "hf", tmp_path / "out", "rope_parameters.rope_type=linear", "rope_parameters.factor=4"
    )
    assert stretched["rope_theta"] == 5e5 and stretched["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert stretched["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert AutoConfig.from_pretrained(tmp_path / "out/checkpoints").rope_parameters == stretched["rope_parameters"]


def test_an_answer_is_asked_for_as_in_training(run: Callable[..., Path], root: Path) -> None:
    """A chat model that was trained on texts in `data.prompt_template`: its exports keep the chat template too."""
    chat = shutil.copytree(root / "tiedFalse", root / "chat")
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(chat)
    given = ("data=sft", "max_steps=1", f"model_name_or_path={chat}", "eval_file=null")
    out = run("laid", 2, 2, *given, 'data.prompt_template="Q: {prompt}\r\nA:"')
    (tokens,) = (TokenizedDataset(folder, True, True) for folder in find_tokenized(root))
    assert (out / "hf" / PROMPT_TEMPLATE).read_bytes() == b"Q: {prompt}\r\nA:"
    record = json.loads((root / "train.jsonl").read_text().splitlines()[0])
    prompt = Prompt([{"role": "user", "content": record["prompt"]}])
    context = tokens.input_ids(0)[: (tokens.labels(0) != IGNORE_INDEX).argmax()]
    export_hugging_face(open_weights(str(out / "checkpoints" / "global_step1")), out / "converted")
    for name in ("checkpoints/global_step1", "hf", "converted"):
        assert Generator(open_weights(str(out / name)), None, 8, 0.0)._encode(prompt) == context.tolist(), name

    # What the next run trains on decides, of a model that comes with such a file, and in its own folder.
    source = open_weights(str(out / "hf"))
    folder = RunFolder(root / "next")
    prepare_folder(build_run(source, folder), tokenizer, prompt_template="{prompt}")
    assert (folder.checkpoints / PROMPT_TEMPLATE).read_text() == "{prompt}"
    for again in (source, SimpleNamespace(path=folder.checkpoints, config=source.config)):
        prepare_folder(build_run(again, folder), tokenizer)
        assert not (folder.checkpoints / PROMPT_TEMPLATE).exists()
