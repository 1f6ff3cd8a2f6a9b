"""Conversion both ways on real files. The oracle is `AutoModelForCausalLM`, and the bits of the source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_folders import assert_same_bits, convert, export, load_transformers, save_source
from support.tiny import VOCAB_SIZE, save_llama, save_tokenizer
from transformers import AutoTokenizer

from errors import UserError
from models.architecture.lookup import build_layers
from models.conversion import convert as conversion
from models.storage.manifest import FileRecord, HashedFile, write_manifest
from models.storage.safetensors_writer import INDEX_NAME
from models.weights.pipeline_checkpoint import layer_file
from models.weights.sources import open_weights
from models.weights.vocabulary import SpecialTokens


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["safetensors", "index", "bin", "legacy bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_round_trip_keeps_every_bit(kind: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    expected = save_source(tmp_path / "hf", kind, dtype, tied=tied)
    save_tokenizer(tmp_path / "hf")
    pipeline = convert(tmp_path / "hf", tmp_path / "pipeline")
    back = export(pipeline, tmp_path / "back")

    assert_same_bits(load_transformers(back), expected)
    stored = load_file(back / "model.safetensors")
    assert_same_bits(
        stored, {name: tensor for name, tensor in expected.items() if not tied or name != "lm_head.weight"}
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    own, written = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "hf", back))
    version_4_fields = {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "torch_dtype": own["dtype"],
    }
    assert written == own | version_4_fields
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "pipeline"]


@pytest.mark.parametrize(("layers", "tied"), [(2, False), (12, False), (12, True)])
def test_the_folder_has_the_files_deepspeed_reads(layers: int, tied: bool, tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", num_hidden_layers=layers, tied=tied)
    step = convert(tmp_path / "hf", tmp_path / "pipeline") / "global_step0"
    count = layers + 2 if tied else layers + 3
    assert {file.name for file in step.iterdir()} == {
        "manifest.json",
        "mp_rank_00_model_states.pt",
        *(f"layer_{i:02d}-model_states.pt" for i in range(count)),
    }
    assert (tmp_path / "pipeline/latest").read_text() == "global_step0"
    names = {path.name for path in (tmp_path / "pipeline").iterdir()}
    assert names == {"latest", "config.json", "generation_config.json", "global_step0", ".written.json"}


def test_a_layer_file_holds_its_layer_and_no_more(tmp_path: Path) -> None:
    """torch.save writes whole storages; one .bin with one storage for all tensors is the worst case."""
    expected = save_source(tmp_path / "hf", "bin", torch.float32)
    storage = torch.cat([tensor.reshape(-1) for tensor in expected.values()])
    pieces = storage.split([tensor.numel() for tensor in expected.values()])
    views = {name: piece.view(tensor.shape) for (name, tensor), piece in zip(expected.items(), pieces, strict=True)}
    torch.save(views, tmp_path / "hf/pytorch_model.bin")
    step = convert(tmp_path / "hf", tmp_path / "pipeline") / "global_step0"
    for file in step.glob("layer_*"):
        nbytes = sum(tensor.nbytes for tensor in torch.load(file).values())
        assert nbytes < file.stat().st_size < nbytes + 5_000
    assert_same_bits(load_transformers(export(tmp_path / "pipeline", tmp_path / "back")), expected)


def test_shards_have_at_most_the_given_size(tmp_path: Path) -> None:
    expected = save_source(tmp_path / "hf", "safetensors", torch.float32)
    convert(tmp_path / "hf", tmp_path / "pipeline")
    back = export(tmp_path / "pipeline", tmp_path / "back", max_shard_size=70_000)
    shards = sorted(back.glob("*.safetensors"))
    index = json.loads((back / INDEX_NAME).read_text())
    assert len(shards) > 3 and [shard.name for shard in shards] == sorted(set(index["weight_map"].values()))
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(sum(tensor.nbytes for tensor in load_file(shard).values()) <= 70_000 for shard in shards)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert_same_bits(load_transformers(back), expected)


def test_mixed_dtypes_are_kept_and_aligned(tmp_path: Path) -> None:
    odd = {"vocab_size": 321, "hidden_size": 45, "head_dim": 12, "num_attention_heads": 1, "num_key_value_heads": 1}
    expected = save_source(tmp_path / "hf", "safetensors", torch.bfloat16, **odd)
    expected = {name: tensor.float() if "norm" in name else tensor for name, tensor in expected.items()}
    save_file(expected, tmp_path / "hf/model.safetensors")
    convert(tmp_path / "hf", tmp_path / "pipeline")
    file = export(tmp_path / "pipeline", tmp_path / "back") / "model.safetensors"
    assert_same_bits(load_file(file), expected)
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    for name, place in header.items():
        assert place["data_offsets"][0] % expected[name].dtype.itemsize == 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_dtype_on_either_way(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = {
        name: tensor.to(dtype) for name, tensor in save_source(tmp_path / "hf", "safetensors", torch.float32).items()
    }
    convert(tmp_path / "hf", tmp_path / "narrow", dtype=dtype)
    convert(tmp_path / "hf", tmp_path / "wide")
    for folder in (export(tmp_path / "narrow", tmp_path / "a"), export(tmp_path / "wide", tmp_path / "b", dtype=dtype)):
        assert_same_bits(load_transformers(folder), expected)
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_the_older_dtype_key_follows_too(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    fields = json.loads(file.read_text())
    file.write_text(
        json.dumps({**{key: value for key, value in fields.items() if key != "dtype"}, "torch_dtype": "float16"})
    )
    written = json.loads(
        (convert(tmp_path / "hf", tmp_path / "pipeline", dtype=torch.bfloat16) / "config.json").read_text()
    )
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"


def test_fp16_overflow_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][2, 3] = 70_000
    save_file(tensors, tmp_path / "hf/model.safetensors")
    with pytest.raises(UserError, match="'model.layers.3.mlp.up_proj.weight'.*fp16"):
        convert(tmp_path / "hf", tmp_path / "pipeline", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_special_tokens_make_rows(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    old = save_source(tmp_path / "hf", "safetensors", dtype, tied=tied)
    save_tokenizer(tmp_path / "hf")
    tokens = SpecialTokens(eos_token="<end>", pad_token="<none>", extra=("<a>", "<b>"))
    convert(tmp_path / "hf", tmp_path / "pipeline", special_tokens=tokens)
    back = export(tmp_path / "pipeline", tmp_path / "back")

    new = load_transformers(back)
    for name, tensor in old.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            mean = tensor.float().mean(0).to(dtype)
            assert torch.equal(new[name], torch.cat([tensor, mean.expand(4, -1)])), name
        else:
            assert torch.equal(new[name], tensor), name

    tokenizer = AutoTokenizer.from_pretrained(back)
    assert tokenizer("<none><a><b><end>").input_ids == [VOCAB_SIZE + 1, VOCAB_SIZE + 2, VOCAB_SIZE + 3, VOCAB_SIZE]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "<end>", "<none>")
    assert tokenizer.decode([5, *range(VOCAB_SIZE, VOCAB_SIZE + 4)], skip_special_tokens=True) == tokenizer.decode([5])
    for folder in (tmp_path / "pipeline", back):
        config = json.loads((folder / "config.json").read_text())
        assert config["vocab_size"] == VOCAB_SIZE + 4
        ids = {"bos_token_id": 1, "eos_token_id": VOCAB_SIZE, "pad_token_id": VOCAB_SIZE + 1}
        assert ids.items() <= config.items()
        assert ids.items() <= json.loads((folder / "generation_config.json").read_text()).items()


def test_spare_rows_are_used_first(tmp_path: Path) -> None:
    old = save_source(tmp_path / "hf", "safetensors", torch.float32, vocab_size=VOCAB_SIZE + 64)
    tokenizer = save_tokenizer(tmp_path / "hf")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<old>"]})
    tokenizer.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "pipeline", special_tokens=SpecialTokens(pad_token="<none>", extra=("<new>",)))
    assert_same_bits(load_transformers(export(tmp_path / "pipeline", tmp_path / "back")), old)
    assert json.loads((tmp_path / "back/config.json").read_text())["pad_token_id"] == VOCAB_SIZE + 1
    written = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert written.pad_token_id == VOCAB_SIZE + 1
    assert set(written.extra_special_tokens) == {"<old>", "<new>"}


def test_a_token_that_is_known_adds_nothing(tmp_path: Path) -> None:
    old = save_source(tmp_path / "hf", "safetensors", torch.float32)
    save_tokenizer(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "pipeline", special_tokens=SpecialTokens(pad_token="</s>"))
    assert_same_bits(load_transformers(export(tmp_path / "pipeline", tmp_path / "back")), old)
    assert json.loads((tmp_path / "back/config.json").read_text())["pad_token_id"] == 2


def test_special_tokens_need_a_tokenizer(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    with pytest.raises(UserError, match="no tokenizer"):
        convert(tmp_path / "hf", tmp_path / "pipeline", special_tokens=SpecialTokens(pad_token="<none>"))
    save_tokenizer(tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"hf/tokenizer.json is not valid JSON \(line 1: "):
        convert(tmp_path / "hf", tmp_path / "pipeline", special_tokens=SpecialTokens(pad_token="<none>"))


def test_a_custom_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    file = tmp_path / "hf/tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoTokenizer": ["tok_x.XTokenizer", None]}})
    )
    (tmp_path / "hf/tok_x.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match=r"tokenizer_config.json.*tok_x.XTokenizer.*--trust_remote_code"):
        convert(tmp_path / "hf", tmp_path / "pipeline")
    convert(tmp_path / "hf", tmp_path / "pipeline", trust_remote_code=True)
    assert (tmp_path / "pipeline/tok_x.py").is_file()


def rewrite(file: Path) -> FileRecord:
    """Writes the file again as training does; returns its record."""
    content = file.read_bytes()
    with HashedFile(file) as stream:
        stream.write(content)
        return stream.finish()


def test_a_training_checkpoint_is_exported(tmp_path: Path) -> None:
    """Two steps, the files of several stages and of the optimizer; `latest` or the given step."""
    expected = {}
    for step, seed in ((7, 1), (8, 2)):
        expected[step] = save_llama(tmp_path / f"hf{step}", seed=seed).state_dict()
        convert(tmp_path / f"hf{step}", tmp_path / f"pipeline{step}")
        target = tmp_path / f"checkpoints/global_step{step}"
        shutil.copytree(tmp_path / f"pipeline{step}/global_step0", target)
        for name in ("mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            (target / name).write_bytes(b"not to be read")
        write_manifest(target, {file.name: rewrite(file) for file in target.glob("layer_*")})
    shutil.copy(tmp_path / "hf8/config.json", tmp_path / "checkpoints")
    (tmp_path / "checkpoints/latest").write_text("global_step8\n")
    assert_same_bits(load_transformers(export(tmp_path / "checkpoints", tmp_path / "newest")), expected[8])
    assert_same_bits(load_transformers(export(tmp_path / "checkpoints/global_step7", tmp_path / "older")), expected[7])


def test_the_layer_files_follow_the_layers(tmp_path: Path) -> None:
    expected = save_llama(tmp_path / "hf").state_dict()
    step = convert(tmp_path / "hf", tmp_path / "pipeline") / "global_step0"
    for index, layer in enumerate(build_layers(open_weights(str(tmp_path / "hf")).config)):
        tensors = torch.load(layer_file(step, index), weights_only=True)
        own = {name: tensor for name, tensor in expected.items() if name.startswith(layer.hf_prefix)}
        assert_same_bits(tensors, {name.removeprefix(layer.hf_prefix): tensor for name, tensor in own.items()})


@pytest.mark.parametrize("kind", ["index", "legacy bin"])
def test_workers_write_the_same_files(kind: str, tmp_path: Path) -> None:
    expected = save_source(tmp_path / "hf", kind, torch.float32)
    folders = [convert(tmp_path / "hf", tmp_path / f"pipeline{workers}", workers=workers) for workers in (1, 3)]
    folders += [
        export(folders[1], tmp_path / f"back{workers}", max_shard_size=70_000, workers=workers, verify=True)
        for workers in (1, 3)
    ]
    for one, three in (folders[:2], folders[2:]):
        files = sorted(file.relative_to(one) for file in one.rglob("*") if file.is_file())
        assert len(files) > 5 and all((one / file).read_bytes() == (three / file).read_bytes() for file in files)
    assert_same_bits(load_transformers(folders[3]), expected)


@pytest.mark.parametrize("way", ["convert", "export"])
def test_verify_finds_a_bit_that_the_disk_has_changed(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(tmp_path / "hf", "safetensors", torch.float32)
    go, source = (
        (convert, tmp_path / "hf") if way == "convert" else (export, convert(tmp_path / "hf", tmp_path / "pipeline"))
    )
    reports: list[tuple[int, int]] = []
    for dtype in (None, torch.bfloat16):
        go(
            source,
            tmp_path / f"good{dtype}",
            dtype=dtype,
            verify=True,
            workers=2,
            progress=lambda *report: reports.append(report),
        )
    assert reports[-1][0] == reports[-1][1] and {total for _, total in reports} == {reports[0][1], reports[-1][1]}

    drop = conversion.drop_from_memory

    def flip_a_bit(file: Path) -> None:
        drop(file)
        if file.name in ("layer_03-model_states.pt", "model.safetensors"):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)

    monkeypatch.setattr(conversion, "drop_from_memory", flip_a_bit)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        UserError,
        match=r"--verify: '.*' in (layer_03-model_states.pt|model.safetensors) is not what the source holds; "
        r".* Nothing was kept",
    ):
        go(source, tmp_path / "bad", verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
