"""Stored values are found by all that they depend on: another tensor, file or key gives another name."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import build_lora, make_adapter
from support.configs import build_config
from support.tiny import save_llama, save_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.components import describe_component
from data.encoders.kinds import KINDS
from data.sources.selection import HoldOut, Selection
from data.storage.rows import RowPlan
from data.streaming.shards import list_shards
from masking import mask
from models.architecture.lookup import build_layers
from models.parallel.shard import NO_CP, NO_TP
from models.weights.fingerprint import fingerprint_as_1_1, fingerprint_weights
from models.weights.sources import open_weights
from models.weights.vocabulary import open_tokenizer
from training import build
from training.config.schema import DataConfig
from training.distributed.ranks import SINGLE_PROCESS
from training.inputs.datasets import build_encoding
from training.objectives.auxiliary import AuxiliaryModel
from training.objectives.objective import Objective
from training.objectives.registry import MODIFIERS, OBJECTIVES, describe_objective
from training.pipeline.preparation import StageOptions
from training.scoring import scored

MODULES = {
    "own_entry": """
from dataclasses import dataclass
from own_rules import is_good

@dataclass(frozen=True)
class Encoder:
    words: str = "words.txt"

    def encode(self, record, location, tokenizer):
        import own_lazy
        return {"input_ids": [1, 2], "labels": [1, 2]}

class Collator:
    def collate_inputs(self, rows): ...
    def collate_labels(self, rows): ...

def keep(record, limit=3):
    return is_good(record)

def read(path="more.jsonl"):
    yield {"text": "a"}
""",
    "own_rules/__init__": "from .inner import is_good\n",
    "own_rules/inner": """
from pathlib import Path
LISTED = Path(__file__).parent / "listed.txt"
import own_rules.deeper

def is_good(record):
    return record["text"] in open("allowed.txt").read()
""",
    "own_rules/deeper": "LIMIT = 1\n",
    "own_lazy": "VALUE = 1\n",
}
EXTENSION = """
from dataclasses import dataclass
from own_rules import is_good
from data.encoders.kind import DataKind
from extensions.preferences.reference import REFERENCE
from training.objectives.auxiliary import AuxiliaryModel
from training.objectives.next_token import SFT
from training.objectives.objective import Scorer

@dataclass(frozen=True)
class OwnEncoder:
    text_field: str = "text"

    def encode(self, record, location, tokenizer):
        return {"input_ids": [1, 2], "labels": [1, is_good(record)]}

class Mine(SFT):
    name, scored = "mine", (REFERENCE,)
    def build_scorer(self, config, stage):
        return Scorer("mine", "rows", None, None, None)

class Teacher(AuxiliaryModel):
    name = "mine"
    def scored(self, config):
        return (REFERENCE,)

KIND = DataKind("mine", OwnEncoder, task="sft")
"""
FILES = ("words.txt", "allowed.txt", "own_rules/listed.txt")


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with code of a user's, and the files that it reads; it is the working directory."""
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(source)
    for name in FILES:
        (tmp_path / name).write_text("a b c\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_any_tensor_of_a_model_is_in_its_fingerprint(tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    # So large that the samples of version 1.1 passed most of the file by
    tensors = load_file(file) | {f"model.unread.{number}": torch.randn(40_000) for number in range(40)}
    seen, seen_by_1_1 = set(), set()
    chosen = [None, *(name for name in tensors if "unread" not in name), *list(tensors)[-12:]]
    for name in chosen:
        changed = tensors | ({} if name is None else {name: tensors[name] * 2 + 1})
        save_file(changed, file, metadata={"format": "pt"})
        source = open_weights(str(tmp_path))
        seen.add(fingerprint_weights(source))
        seen_by_1_1.add(fingerprint_as_1_1(source))
    assert len(seen) == len(chosen) > len(seen_by_1_1)


@pytest.mark.parametrize("form", ["bin", "index"])
def test_other_forms_of_a_model(tmp_path: Path, form: str) -> None:
    model = save_llama(tmp_path, num_hidden_layers=1)
    weights = dict(model.state_dict())
    if form == "bin":
        (tmp_path / "model.safetensors").unlink()
    seen = set()
    for name in [None, *weights]:
        if form == "bin":
            changed = weights | ({} if name is None else {name: weights[name] + 1})
            torch.save({key: tensor.clone() for key, tensor in changed.items()}, tmp_path / "pytorch_model.bin")
        else:
            index = {"metadata": {"note": name}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        seen.add(fingerprint_weights(open_weights(str(tmp_path))))
    assert len(seen) == len(weights) + 1


def test_the_config_next_to_an_adapter(tmp_path: Path) -> None:
    """The merged model has the positions of that config. The fingerprint of version 1.1 left it out."""
    save_llama(tmp_path / "base", num_hidden_layers=1)
    make_adapter(tmp_path / "adapter", tmp_path / "base")
    shutil.copy(tmp_path / "base/config.json", tmp_path / "adapter")
    fields = json.loads((tmp_path / "base/config.json").read_text())
    seen, seen_by_1_1 = set(), set()
    for theta in (10_000.0, 500_000.0):
        rope = fields["rope_parameters"] | {"rope_theta": theta}
        (tmp_path / "adapter/config.json").write_text(json.dumps(fields | {"rope_parameters": rope}))
        source = open_weights(str(tmp_path / "adapter"))
        assert source.config.rope_parameters["rope_theta"] == theta
        seen.add(fingerprint_weights(source))
        seen_by_1_1.add(fingerprint_as_1_1(source))
    assert (len(seen), len(seen_by_1_1)) == (2, 1)


@pytest.mark.parametrize("what", ["encoder", "filter", "records", "collator"])
def test_any_file_of_a_users_code(own_code: Path, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    names = {"encoder": "Encoder", "filter": "keep", "records": "read", "collator": "Collator"}
    spec = {"_target_": f"own_entry.{names[what]}"}

    def describe() -> Any:
        if what == "records":
            return describe_component(spec), list_shards([f"own:{json.dumps(spec)}"], "train_file")
        config = build_config(f"data.{what}={{_target_: {spec['_target_']}}}")
        key = build_encoding(config, "train_file", tokenizer).compute_key([["train.jsonl"]])
        return describe_objective(config)["data.collator"] if what == "collator" else key

    before = describe()
    assert describe() == before
    for name in [*(f"{name}.py" for name in MODULES), *FILES]:
        file = own_code / name
        content = file.read_text()
        file.write_text(content + "\n" + ("X = 2" if file.suffix == ".py" else "d"))
        assert describe() != before, name
        file.write_text(content)
        assert describe() == before, name


@pytest.mark.parametrize("what", ["tokens", "reference", "auxiliary"])
def test_the_code_of_a_users_extension(
    own_code: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its kinds of data and what scores them are found by their source; versions stand for the project's own alone."""
    file = own_code / "own_extension.py"
    file.write_text(EXTENSION)
    mine = importlib.import_module(file.stem)
    monkeypatch.setitem(KINDS, "mine", mine.KIND)
    config = build_config("data.name=mine", "task=sft")

    def describe() -> Any:
        if what == "tokens":
            return build_encoding(config, "train_file", tokenizer).compute_key([])
        return find_made_scores(mine.Mine() if what == "reference" else mine.Teacher(), monkeypatch)

    before = describe()
    for name in ("own_extension.py", "own_rules/deeper.py"):
        content = (own_code / name).read_text()
        (own_code / name).write_text(content + "X = 2\n")
        assert describe() != before, name
        (own_code / name).write_text(content)
        assert describe() == before, name
    assert not any(scored.describe_maker(each) for each in (*OBJECTIVES.values(), *MODIFIERS))


def find_made_scores(maker: Objective | AuxiliaryModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings by which a run asks for the scores of its reference, or of its auxiliary model."""
    asked: list[dict[str, Any]] = []

    def find(name: str, path: Path, plan: RowPlan, columns: Any, model_id: str, **settings: Any) -> None:
        asked.append(settings)

    def find_missing(datasets: Any, find: Any, ranks: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        find("train_file", Path("tokens"))
        return {}, {}

    for name, value in (("find_scores", find), ("find_missing", find_missing), ("_identify", lambda *_: "0")):
        monkeypatch.setattr(build, name, value)
    config, architecture = build_config(), SimpleNamespace(vocab_size=1)
    data: Any = SimpleNamespace(
        datasets={"train_file": Path("tokens")}, ranks=SINGLE_PROCESS, add_scores=lambda scores: scores
    )
    setup: Any = SimpleNamespace(config=config, objective=maker, reference=object(), architecture=architecture)
    if isinstance(maker, Objective):
        stage_ranks = SimpleNamespace(parallel=NO_TP, sequence_part=NO_CP)
        engine: Any = SimpleNamespace(module=SimpleNamespace(ranks=stage_ranks))
        build._prepare_reference(setup, engine, data)
    else:
        own = SimpleNamespace(source=None, architecture=architecture)
        setup.auxiliary = SimpleNamespace(model=maker, setup=own)
        run: Any = SimpleNamespace(config=config, setup=setup)
        build.prepare_auxiliary(run, data)
    return asked[0]


def test_a_file_that_a_field_names(own_code: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (own_code / "other.txt").write_text("a")
    keys = set()
    for content in ("a", "b"):
        (own_code / "other.txt").write_text(content)
        for spec in ("data.encoder={_target_: own_entry.Encoder, words: other.txt}",
                     "data.filter={_target_: own_entry.keep, limit: [other.txt]}"):  # fmt: skip
            keys.add(build_encoding(build_config(spec), "train_file", tokenizer).compute_key([]))
    assert len(keys) == 4


def test_a_field_that_is_hidden_as_a_secret(own_code: Path) -> None:
    described = []
    for value in ("planted-a", "planted-b"):
        spec = f"{{_target_: own_entry.Collator, split_token: {value}}}"
        config = build_config(f"data.collator={spec}", f"loss={spec}")
        described.append(mask(describe_objective(config)))  # as `TrainerState` has it
    for key in ("data.collator", "loss"):
        assert described[0][key] != described[1][key] and not any("planted" in each[key] for each in described)


def list_others(value: Any) -> list[Any]:
    """Other values of a key, of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, Enum):
        return [each for each in type(value) if each is not value]
    if isinstance(value, int | float):
        return [value + 1]
    if isinstance(value, tuple | list):
        return [type(value)([*value, "<other>"])]
    if isinstance(value, dict):
        return [value | {"other": True}]
    return ["other {prompt}"] if value is None or isinstance(value, str) else []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "chat" else pytest.mark.full) for name in KINDS]
)
def test_any_field_of_an_encoder(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    encoding = build_encoding(build_config(f"data={name}"), "train_file", tokenizer)
    encoder: Any = encoding.encoder
    shown = [field.name for field in fields(encoder) if field.repr]
    assert {field.name for field in fields(encoder)} - {*shown} <= {"chat_template"}  # whose text the tokenizer has
    others = [replace(encoder, **{name: value}) for name in shown for value in list_others(getattr(encoder, name))]
    assert len(others) >= len(shown)
    keys = {replace(encoding, encoder=each).compute_key([]) for each in (encoder, *others)}
    assert len(keys) == len(others) + 1


def test_any_other_field_of_an_encoding(tokenizer: PreTrainedTokenizerBase) -> None:
    encoding = build_encoding(build_config(), "train_file", tokenizer)
    plain = [field.name for field in fields(encoding) if field.name not in ("encoder", "tokenizer", "selection")]
    others = [replace(encoding, **{name: value}) for name in plain for value in list_others(getattr(encoding, name))]
    given = {"max_records": 3, "hold_out": HoldOut(fraction=0.1), "takes_held_out": True}
    # The filter is tested by its code, and the bound follows from the records.
    assert {field.name for field in fields(Selection)} == {*given, "filter", "bound"}
    others += [replace(encoding, selection=Selection(**{name: value})) for name, value in given.items()]
    assert len({each.compute_key([]) for each in (encoding, *others)}) == len(others) + 1


def test_every_key_of_the_data_has_its_place() -> None:
    """A key of `data` is a field of an encoder, or read as one of the others, or no token depends on it."""
    encoder_fields = {field.name for kind in KINDS.values() for field in fields(kind.encoder)}  # type: ignore[arg-type]
    in_tokenizer, in_encoding = {"chat_template", "special_tokens", "eos_token"}, {"length_policy", "on_bad_record"}
    in_selection = {"filter", "max_samples", "eval_fraction", "eval_samples"}
    in_rows = {"packing", "mixture_by"}
    compared_by_resume = {"collator", "streaming", "shuffle_block", "group_by_length"}
    without_effect = {"pad_to", "cache_dir", "num_proc"}
    places = encoder_fields | in_tokenizer | in_encoding | in_selection | in_rows | compared_by_resume | without_effect
    assert {field.name for field in fields(DataConfig)} <= places | {"name", "encoder"}


def test_any_field_of_a_plan_of_rows(tmp_path: Path) -> None:
    plan = RowPlan(64)
    others = [replace(plan, **{field.name: value}) for field in fields(plan)
              for value in list_others(getattr(plan, field.name))]  # fmt: skip
    assert len(others) >= len(fields(plan))
    assert len({each.folder(tmp_path) for each in (plan, *others)}) == len(others) + 1


def test_any_token_and_template_of_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    keys = set()
    changes = {}, {"chat_template": "{{ messages }}"}, {"pad_token": "</s>"}, {"split_special_tokens": True}
    for change in changes:
        given = {"pad_token": "<pad>", "eos_token": "</s>"} | change
        again = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **given)
        keys.add(build_encoding(build_config(), "train_file", again).compute_key([]))
    assert len(keys) == len(changes)


def test_any_option_of_a_tokenizer_in_python(tmp_path: Path) -> None:
    """Whatever changes its tokens; not where it lies."""
    special = ["<|endoftext|>", "<|startoftext|>", "<URL>", "<SP>", "<BR>"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*special, *letters, *":/.", *(f"<|byte{number}|>" for number in range(256))]
    keys, encoded = set(), set()
    for folder, cleans in (("one", False), ("another", False), ("cleans", True)):
        path = tmp_path / folder
        path.mkdir()
        (path / "vocab.txt").write_text("\n".join(tokens) + "\n")
        (path / "emoji.json").write_text(json.dumps({"emoji": {}, "emoji_inv": {}}))
        (path / "config.json").write_text(json.dumps({"model_type": "gpt_neox_japanese"}))
        options = {"tokenizer_class": "GPTNeoXJapaneseTokenizer", "do_clean_text": cleans, "eos_token": special[0]}
        options |= {"unk_token": special[0], "pad_token": special[0], "bos_token": special[1]}
        (path / "tokenizer_config.json").write_text(json.dumps(options))
        tokenizer = open_tokenizer(path)
        assert not tokenizer.is_fast
        keys.add(build_encoding(build_config(), "train_file", tokenizer).compute_key([]))
        encoded.add(tuple(tokenizer("see https://a.bc/d now")["input_ids"]))
    assert len(keys) == len(encoded) == 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_llama(tmp_path / "model", num_hidden_layers=2)
    return tmp_path / "model"


def test_all_that_the_reference_is_computed_with(own_code: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_weights(str(model))
    layers = build_layers(source.config)
    monkeypatch.setattr(scored, "broadcast_from_main", lambda compute, ranks: compute())
    monkeypatch.setattr(build, "current_device", lambda: torch.device("cpu"))

    def identify(
        *overrides: str,
        attention: str = "sdpa",
        targets: tuple[str, ...] = ("q_proj",),
        four: bool = False,
        kept: str | None = None,
        **changes: Any,
    ) -> str:
        adapter = replace(build_lora(layers, target_modules=list(targets)), in_4bit=four, kept=kept)
        config, architecture = build_config(*overrides), source.config
        architecture._attn_implementation = attention
        kernels = replace(build.choose_kernels(config, architecture), **changes)
        return scored.compute_model_id(source, config, kernels, adapter.list_quantized(layers), SINGLE_PROCESS)

    in_4bit, kept = ("adapter=lora", "adapter.load_in_4bit=true"), ("adapter=lora", "adapter.keep_quantized=true")
    plain = build.choose_kernels(build_config(), source.config)
    found = [
        identify(),
        identify("precision=fp32"),
        identify("compile=true"),
        identify("flash_kernels=fa3"),
        identify(attention="eager"),
        identify(fuses=True),
        identify("rope_parameters.rope_type=linear", "rope_parameters.factor=2"),
        identify("data.collator={_target_: own_entry.Collator}"),
        identify(*in_4bit, four=True),
        identify(*in_4bit, targets=("model.layers.1.self_attn.q_proj",), four=True),
        identify(*kept, kept="fp8"),
        identify(*kept, kept="int4"),
    ]
    assert len(set(found)) == len(found)
    for field in fields(plain):  # a field that is added too
        assert identify(**{field.name: "another"}) not in found
    # What was stored before a run had `fp32_routers` is found again
    before = {field.name: getattr(plain, field.name) for field in fields(plain) if field.name != "fp32_routers"}
    assert scored._list_kernels(plain) == tuple(before.values())
    # What a stage is built with beyond that is of training, in the adapter, or says only where weights lie.
    others = {"checkpointing", "adapter", "freeze", "routers", "neftune_noise_alpha", "weight_sharding", "sums_in_fp32"}
    assert {field.name for field in fields(StageOptions)} == {"kernels"} | others
    same = ("learning_rate=1", "max_steps=3", "adapter=lora", "num_stages=4", "fused_kernels=auto", "freeze=[norm]")
    assert identify(*same, targets=("v_proj",)) == found[0]

    def identify_kept(*overrides: str, kept: frozenset[str] = frozenset({"weight"})) -> str:
        held, config = [replace(layer, fp32=kept) for layer in layers], build_config(*overrides)
        setup: Any = SimpleNamespace(adapter=None, layers=held, config=config, architecture=source.config)
        return build._identify(source, setup, SINGLE_PROCESS)

    source.config._attn_implementation = "sdpa"
    assert identify_kept() != identify_kept(kept=frozenset()) == found[0]
    for key in ("precision=fp32", "zero_stage=3"):  # all parameters are in fp32, or none stays so
        assert identify_kept(key) == identify_kept(key, kept=frozenset())
