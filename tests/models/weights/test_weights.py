"""Errors in a source: one line that names the file or tensor, before anything is written."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import DryRunFileInfo
from huggingface_hub._tree_cache import TREE_CACHE_FORMAT_VERSION
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.families import save_family
from support.mutations import mutate
from support.tiny import save_llama
from transformers import AutoModelForCausalLM

from errors import Ending, UserError
from models.architecture.lookup import build_layers
from models.conversion.convert import WriteOptions, convert_to_pipeline, export_hugging_face
from models.storage.hub import describe_place
from models.weights import sources
from models.weights.hugging_face_folder import HuggingFaceFolder
from models.weights.sources import open_weights

MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One complete folder of each kind; a test breaks a copy."""
    root = tmp_path_factory.mktemp("originals")
    save_llama(root / "hf")
    save_llama(root / "tied", tied=True)
    convert_to_pipeline(open_weights(str(root / "hf")), root / "pipeline")
    export_hugging_face(open_weights(str(root / "pipeline")), root / "sharded", max_shard_size=100_000)
    return {path.name: path for path in root.iterdir()}


def read_everything(path: Path) -> None:
    source = open_weights(str(path))
    layers = build_layers(source.config)
    source.check_complete(layers)
    for index, layer in enumerate(layers):
        source.read_layer(index, layer)


def edit_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / MODEL).items()}
    change(tensors)
    save_file(tensors, folder / MODEL)


def forget_manifest(folder: Path) -> None:
    """As a folder that was converted before it had one."""
    (folder / "global_step0" / "manifest.json").unlink()


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    with file.open("rb+") as stream:
        stream.truncate(file.stat().st_size // 2)


def drop_from_shard(folder: Path) -> None:
    file = folder / "model-00002-of-00006.safetensors"
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)


def replace_by_pipe(folder: Path) -> None:
    (folder / MODEL).unlink()
    os.mkfifo(folder / MODEL)


BROKEN: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    "missing tensor": (
        "hf",
        lambda d: edit_tensors(d, lambda t: t.pop("model.norm.weight")),
        ("'model.norm.weight'", "missing tensors: 1"),
    ),
    "unknown tensor": (
        "hf",
        lambda d: edit_tensors(d, lambda t: t.update({"model.layers.0.extra": torch.ones(1)})),
        ("'model.layers.0.extra'", "another architecture"),
    ),
    "wrong shape": (
        "hf",
        lambda d: edit_json(d / "config.json", intermediate_size=72),
        ("layers.0.mlp", "[80, 48]", "[72, 48]"),
    ),
    "fewer layers": ("hf", lambda d: edit_json(d / "config.json", num_hidden_layers=4), ("'model.layers.4.",)),
    "truncated": ("hf", lambda d: truncate(d / MODEL), (MODEL, "truncated")),
    "no weights": ("hf", lambda d: (d / MODEL).unlink(), ("no weights", "latest")),
    "no config": ("hf", lambda d: (d / "config.json").unlink(), ("no config.json",)),
    "a size of 0": (
        "hf",
        lambda d: edit_json(d / "config.json", hidden_size=0),
        ("config.json: hidden_size is 0, and must be 1",),
    ),
    "a size below 0": (
        "hf",
        lambda d: edit_json(d / "config.json", num_hidden_layers=-1),
        ("config.json: num_hidden_layers is -1, and must be 1 or more",),
    ),
    "a million layers": (
        "hf",
        lambda d: edit_json(d / "config.json", num_hidden_layers=10**6),
        ("config.json: num_hidden_layers is 1000000, more than the ", " tensors in the files next to it"),
    ),
    "a huge head": (
        "hf",
        lambda d: edit_json(d / "config.json", head_dim=10**9),
        ("config.json: head_dim is 1000000000, more than the ", " numbers that the largest tensor holds in the files"),
    ),
    "heads that do not fit": (
        "hf",
        lambda d: edit_json(d / "config.json", num_key_value_heads=3),
        ("config.json",),
    ),
    "an unknown rope type": (
        "hf",
        lambda d: edit_json(d / "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        ("config.json: rope_type is spiral; transformers knows default, ",),
    ),
    "a list as model_type": (
        "hf",
        lambda d: edit_json(d / "config.json", model_type=["llama"]),
        ("config.json: model_type is ['llama'], and must be a name",),
    ),
    "a nested config": (
        "hf",
        lambda d: (d / "config.json").write_text('{"a": ' + "[" * 100_000),
        ("config.json", "nested too deeply"),
    ),
    "a number of ten thousand digits": (
        "hf",
        lambda d: (d / "config.json").write_text('{"a": ' + "1" * 10_000 + "}"),
        ("config.json cannot be read",),
    ),
    "a pipe": ("hf", replace_by_pipe, (f"{MODEL} is not a regular file",)),
    "numbers in an index": (
        "sharded",
        lambda d: edit_json(d / "model.safetensors.index.json", weight_map={"model.norm.weight": 5}),
        ("index.json: weight_map gives 'model.norm.weight' no file",),
    ),
    "half a config": ("hf", lambda d: truncate(d / "config.json"), ("config.json", "half-written")),
    "config of a list": ("hf", lambda d: (d / "config.json").write_text("[]"), ("config.json", "list")),
    "bad value": ("hf", lambda d: edit_json(d / "config.json", hidden_size="big"), ("config.json", "hidden_size")),
    "unknown model_type": (
        "hf",
        lambda d: edit_json(d / "config.json", model_type="flan"),
        ("config.json", "'flan'", "known: ", "llama, "),
    ),
    "no model_type": ("hf", lambda d: (d / "config.json").write_text("{}"), ("config.json", "model_type")),
    "custom code": (
        "hf",
        lambda d: edit_json(d / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"}),
        ("custom code", "AutoModelForCausalLM", "--trust_remote_code"),
    ),
    "quantized weights": (
        "hf",
        lambda d: edit_json(d / "config.json", quantization_config={"quant_method": "gptq"}),
        ("config.json", "quantized (gptq)", "fp8, mxfp4 and int4"),
    ),
    "untied weights": (
        "tied",
        lambda d: edit_tensors(d, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        ("'lm_head.weight' differs", "tie_word_embeddings"),
    ),
    "missing shard": (
        "sharded",
        lambda d: (d / "model-00002-of-00006.safetensors").unlink(),
        ("model-00002-of-00006", "not there"),
    ),
    "tensor not in its shard": ("sharded", drop_from_shard, ("model-00002-of-00006", "index says so")),
    "half an index": (
        "sharded",
        lambda d: truncate(d / "model.safetensors.index.json"),
        ("index.json", "half-written"),
    ),
    "index without a map": (
        "sharded",
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        ("index.json", "weight_map"),
    ),
    "missing layer file": (
        "pipeline",
        lambda d: (d / "global_step0/layer_03-model_states.pt").unlink(),
        ("1 of 8", "layer_03-model_states.pt"),
    ),
    "half a layer file": (
        "pipeline",
        lambda d: truncate(d / "global_step0/layer_03-model_states.pt"),
        ("layer_03-model_states.pt is damaged", "bytes", "were saved"),
    ),
    "half a layer file without a manifest": (
        "pipeline",
        lambda d: (forget_manifest(d), truncate(d / "global_step0/layer_03-model_states.pt")),
        ("layer_03-model_states.pt", "half-written"),
    ),
    "a flipped byte": (
        "pipeline",
        lambda d: flip_a_byte(d / "global_step0/layer_03-model_states.pt"),
        ("layer_03-model_states.pt is damaged: its bytes are not those that were saved",),
    ),
    "extra layer file": (
        "pipeline",
        lambda d: edit_json(d / "config.json", num_hidden_layers=4),
        ("8 layer files", "layer_07"),
    ),
    "layer of another shape": (
        "pipeline",
        lambda d: edit_json(d / "config.json", intermediate_size=72),
        ("layer_01-model_states.pt", "mlp", "[80, 48]", "[72, 48]"),
    ),
    "no tensors": (
        "pipeline",
        lambda d: (forget_manifest(d), torch.save([1], d / "global_step0/layer_03-model_states.pt")),
        ("layer_03-model_states.pt", "tensors"),
    ),
    "missing step": (
        "pipeline",
        lambda d: (d / "latest").write_text("global_step9"),
        ("latest names 'global_step9'", "give a checkpoint by its own path, such as", "/global_step0"),
    ),
    "empty latest": (
        "pipeline",
        lambda d: (d / "latest").write_text(""),
        ("latest is damaged: it is empty", "give a checkpoint by its own path, such as", "/global_step0"),
    ),
    "no latest": (
        "pipeline",
        lambda d: (d / "latest").unlink(),
        ("holds checkpoints and no file latest", "give a checkpoint by its own path, such as", "/global_step0"),
    ),
    "no latest and nothing whole": (
        "pipeline",
        lambda d: ((d / "latest").unlink(), (d / "global_step0/layer_03-model_states.pt").unlink()),
        ("holds checkpoints and no file latest; copy the checkpoint again",),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    kind, damage, expected = BROKEN[name]
    folder = Path(shutil.copytree(originals[kind], tmp_path / "folder"))
    read_everything(folder)  # whole before
    damage(folder)
    with pytest.raises(UserError) as caught:
        read_everything(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message, message
    assert all(part in message for part in expected), message


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_a_folder_that_a_stranger_wrote_is_read_or_refused_within_seconds(
    seed: int, originals: dict[str, Path], tmp_path: Path
) -> None:
    rng = random.Random(seed)
    for number in range(50):
        folder = Path(shutil.copytree(originals[rng.choice(["hf", "sharded", "tied"])], tmp_path / str(number)))
        index = folder / "model.safetensors.index.json"
        mutate(rng.choice([folder / "config.json"] * 4 + [index] * index.is_file()), rng)
        start = time.process_time()
        try:
            read_everything(folder)
        except UserError as error:
            assert "\n" not in str(error), str(error)
        assert time.process_time() - start < 20, (folder / "config.json").read_text()


@pytest.mark.parametrize("kind", ["hf", "sharded"])
def test_weights_next_to_a_checkpoint_of_something_else(kind: str, originals: dict[str, Path], tmp_path: Path) -> None:
    """As the Trainer of transformers leaves a checkpoint under DeepSpeed."""
    folder = Path(shutil.copytree(originals[kind], tmp_path / "checkpoint-500"))
    (folder / "global_step500").mkdir()
    (folder / "latest").write_text("global_step500")
    read_everything(folder)


def test_a_path_that_is_not_a_folder_is_refused(originals: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="is a file"):
        open_weights(str(originals["hf"] / MODEL))
    with pytest.raises(UserError, match="no/such: id"):
        open_weights("no/such: id")


def test_nothing_runs_from_a_pickle(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["pipeline"], tmp_path / "folder"))

    class Payload:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"weight": Payload()}, folder / "global_step0/layer_00-model_states.pt")
    with pytest.raises(UserError, match="layer_00"):
        read_everything(folder)
    assert not (tmp_path / "ran").exists()


def test_a_step_can_be_named(originals: dict[str, Path]) -> None:
    read_everything(originals["pipeline"] / "global_step0")


def test_other_safetensors_next_to_the_model_are_ignored(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["hf"], tmp_path / "folder"))
    save_file({"base_model.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")
    read_everything(folder)


def test_the_file_of_a_folder_is_the_one_that_transformers_reads(originals: dict[str, Path], tmp_path: Path) -> None:
    """`save_pretrained` twice leaves one file and the shards of before, with their index."""
    for folder in (tmp_path / "both", tmp_path / "strays"):
        shutil.copytree(originals["sharded"], folder)
    save_llama(tmp_path / "both", seed=1)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "both").state_dict()
    source = open_weights(str(tmp_path / "both"))
    for index, layer in enumerate(build_layers(source.config)):
        for name, tensor in source.read_layer(index, layer).items():
            assert torch.equal(tensor, theirs[layer.hf_prefix + name])
    (tmp_path / "strays/model.safetensors.index.json").unlink()
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "strays")
    with pytest.raises(UserError, match="transformers reads no files of other names"):
        open_weights(str(tmp_path / "strays"))


def test_a_tensor_that_the_index_places_elsewhere_is_found(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["sharded"], tmp_path / "folder"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {name: shards[number % len(shards)] for number, name in enumerate(index["weight_map"])}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read_everything(folder)


def test_a_stack_has_the_widest_dtype_of_its_experts(tmp_path: Path) -> None:
    save_family(tmp_path / "hf", "deepseek_v3")
    stored = load_file(tmp_path / "hf" / MODEL)
    first = {name: t.bfloat16() if ".experts.0." in name else t for name, t in stored.items()}
    save_file(first, tmp_path / "hf" / MODEL)
    options = WriteOptions(verify=True)
    convert_to_pipeline(open_weights(str(tmp_path / "hf")), tmp_path / "pipeline", options)
    export_hugging_face(open_weights(str(tmp_path / "pipeline")), tmp_path / "back", options)
    for name, tensor in load_file(tmp_path / "back" / MODEL).items():
        assert torch.equal(tensor, first[name].to(tensor.dtype)), name
    assert any(".experts.1." in name for name in stored)


def test_verify_compares_with_the_files_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with what the reader makes of them."""
    save_llama(tmp_path / "hf")
    read = HuggingFaceFolder.read_layer
    monkeypatch.setattr(
        HuggingFaceFolder,
        "read_layer",
        lambda self, *layer: {name: tensor.bfloat16().float() for name, tensor in read(self, *layer).items()},
    )
    with pytest.raises(UserError, match="is not what the source holds"):
        convert_to_pipeline(open_weights(str(tmp_path / "hf")), tmp_path / "out", WriteOptions(verify=True))


def test_custom_code_that_is_trusted_is_not_run(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["hf"], tmp_path / "folder"))
    edit_json(folder / "config.json", auto_map={"AutoConfig": "configuration_x.XConfig"})
    (folder / "configuration_x.py").write_text("raise SystemExit('ran')")
    assert open_weights(str(folder), trust_remote_code=True).config.model_type == "llama"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("IO Error: No space left on device (os error 28)")],
)
def test_a_full_disk_is_no_wrong_name(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match="'org/name' could not be downloaded into .*, whose disk is full") as caught:
        sources._download("org/name")
    assert caught.value.ending is Ending.DISK


def replace_download(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str], size: int = 0) -> None:
    """Replace `snapshot_download`, which is first asked for what it would download: a file of `size` bytes that is
    there, and one that is not."""

    def snapshot_download(name: str, dry_run: bool = False, **options: Any) -> Any:
        if not dry_run:
            return download(name, **options)
        found = DryRunFileInfo("0" * 40, size, "a.safetensors", "", is_cached=False, will_download=True)
        return [found, replace(found, is_cached=True, will_download=False)]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_a_download_that_the_disk_has_no_room_for_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def download(name: str, **_: object) -> str:
        begun.append(name)
        return "/nowhere"

    monkeypatch.setattr(sources, "measure_free", lambda folder: 689_000_000_000)
    for size in (689_000_000_000, 690_000_000_000):
        replace_download(monkeypatch, download, size)
        if size > 689_000_000_000:
            message = "'org/name': 690.00 GB are to be downloaded into .*, whose disk has 689.00 GB free; make room, or"
            with pytest.raises(UserError, match=message) as caught:
                sources._download("org/name")
            assert caught.value.ending is Ending.DISK
        else:
            sources._download("org/name")
    assert begun == ["org/name"] * len(sources.HUB_FORMATS)


def test_folders_of_a_hub_model_are_not_downloaded(originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss is there three times, in other programs' formats too."""
    files = ["config.json", "model-00001-of-00002.safetensors", "original/model.safetensors", "metal/model.bin"]
    downloaded: list[str] = []

    def snapshot_download(hub_id: str, revision: None, **patterns: list[str]) -> str:
        downloaded.extend(filter_repo_objects(files, **patterns))
        return str(originals["hf"])

    replace_download(monkeypatch, snapshot_download)
    read_everything(Path("openai/gpt-oss-20b"))
    assert downloaded == files[:2]


SHARDED_BIN = ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"]


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin", "training_args.bin"], ["model.safetensors"]),
        (["model.safetensors", *SHARDED_BIN], ["model.safetensors"]),
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (SHARDED_BIN, SHARDED_BIN),
        (["fp16.safetensors", "pytorch_model.bin"], ["fp16.safetensors", "pytorch_model.bin"]),
        (["consolidated.safetensors"], []),
        ([], []),
    ],
    ids=["both", "one sharded", "authors'", "bin", "bin next to another name", "authors' alone", "none"],
)
def test_one_format_of_a_hub_model_is_downloaded(
    listed: list[str], wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(hub_id: str, revision: None, **patterns: list[str]) -> str:
        for name in filter_repo_objects(["config.json", *listed], **patterns):
            (tmp_path / name).touch()
        return str(tmp_path)

    replace_download(monkeypatch, snapshot_download)
    sources._download("org/name")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["config.json", *wanted])


@pytest.mark.parametrize("held", ["model.safetensors", "pytorch_model.bin", None])
def test_offline_the_format_that_the_cache_holds_is_taken(
    held: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By huggingface_hub itself, which knows from its listing that the repository has both."""
    commit = "0123456789" * 4
    folder = tmp_path / "models--org--name"
    snapshot = folder / "snapshots" / commit
    for file in (snapshot / "config.json", folder / "refs" / "main", folder / "trees" / f"{commit}.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    if held is not None:
        (snapshot / held).touch()
    files = ("config.json", "model.safetensors", "pytorch_model.bin")
    entries = {name: {"size": 0, "blob_id": "0" * 40} for name in files}
    edited = {"format_version": TREE_CACHE_FORMAT_VERSION, "files": entries}
    (folder / "trees" / f"{commit}.json").write_text(json.dumps(edited))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if held is None:
        with pytest.raises(UserError, match=r"could not be downloaded from the hub \(IncompleteSnapshotError\)"):
            sources._download("org/name")
    else:
        assert sources._download("org/name") == snapshot


def test_the_index_of_files_that_were_not_copied_is_not_read(originals: dict[str, Path], tmp_path: Path) -> None:
    """As of a download of *.json and *.safetensors."""
    folder = Path(shutil.copytree(originals["hf"], tmp_path / "folder"))
    (folder / SHARDED_BIN[0]).write_text(json.dumps({"weight_map": {"lm_head.weight": SHARDED_BIN[1]}}))
    read_everything(folder)


def test_a_revision_of_a_hub_model_is_asked_for(originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no hub here: `snapshot_download` is replaced, as it is called."""
    asked: list[tuple[str, object]] = []

    def snapshot_download(hub_id: str, revision: str | None = None, **patterns: list[str]) -> str:
        asked.append((hub_id, revision))
        return str(originals["hf"])

    replace_download(monkeypatch, snapshot_download)
    for name in ("org/name", "org/name@v1.0", "org/name@refs/pr/3"):
        open_weights(name)
    assert asked == [("org/name", None), ("org/name", "v1.0"), ("org/name", "refs/pr/3")]
    with pytest.raises(UserError, match="'org/name@' ends in '@'; give a revision after it"):
        open_weights("org/name@")


def test_a_place_is_a_path_or_a_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    assert describe_place(snapshot) == "org/name@0123abcd"
    assert describe_place(tmp_path / "model") == f"{tmp_path}/model"


def test_of_a_stack_the_given_experts_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_weights(str(save_family(tmp_path, "mixtral")))
    layer = next(layer for layer in build_layers(source.config) if any("experts" in name for name in layer.shapes()))
    whole = source.read_layer(1, layer)
    stacks, names = [name for name in whole if "experts" in name], []
    read = HuggingFaceFolder._read
    monkeypatch.setattr(HuggingFaceFolder, "_read", lambda self, name: names.append(name) or read(self, name))
    own = range(2, 4)
    tensors = source.read_layer(1, replace(layer, experts=dict.fromkeys(stacks, own)))
    numbers = {int(match[1]) for name in names if (match := re.search(r"experts\.(\d+)\.", name))}
    assert len(stacks) == 2 and numbers == set(own)
    for name, tensor in tensors.items():
        taken = slice(own.start, own.stop) if name in stacks else slice(None)
        assert torch.equal(tensor[taken], whole[name][taken]), name


def test_an_adapter_that_is_its_own_base_is_named(tmp_path: Path) -> None:
    for name, base in (("one", "two"), ("two", "one"), ("alone", "alone")):
        (tmp_path / name).mkdir()
        LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path / name)
        file = tmp_path / name / "adapter_config.json"
        fields = json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / base)}
        file.write_text(json.dumps(fields))
    for name in ("one", "alone"):
        with pytest.raises(
            UserError, match=f"{name}/adapter_config.json: base_model_name_or_path leads back to .*{name}"
        ):
            open_weights(str(tmp_path / name))
