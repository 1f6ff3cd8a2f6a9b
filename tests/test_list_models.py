"""The table of families in docs/models.md is what is found: a sample in the short suite, all in the long one."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from support.cases import Case, train_run
from support.configs import build_config
from support.family_trials import BOUND, Trial, try_families, try_family
from support.planned import plan_config
from support.published import build_published_config
from support.runs import read_metrics
from support.tiny import VOCAB_SIZE, save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from errors import UserError
from models.generic.shrink import shrink
from models.layers.wrapped import TEXT_CONFIG

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import list_models  # noqa: E402

TABLE = list_models.read_table(list_models.PAGE.read_text())
SAMPLE = ("axk2", "bloom", "deepseek_v32", "falcon", "granite", "llama", "minimax_m3_vl_text", "opt")
RUN = ("gemma4_text", "opt")
PLANNED = ("falcon", "gemma4_text", "mixtral", "nanochat")
TRAINED = [name for name, (how, *_) in TABLE.items() if how in ("file", "generic")]
WAYS = ("", "data.packing=true", "tensor_parallel_size=2", "context_parallel_size=2")


def test_the_table_names_each_family_once() -> None:
    assert list(TABLE) == list_models.list_families()
    assert sum(how in ("file", "generic") for how, *_ in TABLE.values()) >= 60
    assert all(reason for how, reason, _ in TABLE.values() if how == "refused")
    assert sum(divided == "figure" for *_, divided in TABLE.values()) >= 30
    kept_whole = [name for name, (*_, divided) in TABLE.items() if divided == list_models.NOT_STACKED]
    assert kept_whole == ["dbrx", "jetmoe", "longcat_flash"]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_row_is_what_is_found(model_type: str) -> None:
    trial = try_family(model_type)
    assert (trial.how, list_models.write_reason(trial)) == TABLE[model_type][:2]
    assert trial.how == "refused" or (trial.gradients is not None and trial.gradients < BOUND)


@pytest.mark.full
def test_the_table_is_what_is_found() -> None:
    assert list_models.check(try_families(list_models.list_families(), train=True), TABLE) == 0


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in PLANNED else pytest.mark.full) for name in TRAINED]
)
def test_a_family_of_the_table_can_be_planned(model_type: str, tmp_path: Path) -> None:
    """For GPUs, with the kernels that a run has there; or one line says what it cannot do."""
    config = build_published_config(model_type)
    shrink(getattr(config, TEXT_CONFIG, config)).save_pretrained(tmp_path)
    size = ("world_size=2", "max_seq_length=16", "micro_batch_size=1", "global_batch_size=4", "hardware=h100")
    for way in WAYS:
        keys = (f"model_name_or_path={tmp_path}", "precision=bf16", "plan=true", *size, *filter(None, [way]))
        with suppress(UserError) if way else nullcontext():
            plan = plan_config(build_config(*keys))
            assert plan.tokens_per_second > 0 and plan.fullest.memory.peak > 0


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    save_records(root / "train.jsonl", 8)
    save_records(root / "eval.jsonl", 4, seed=1)
    save_tokenizer(root / "tokenizer")
    return root


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in RUN else pytest.mark.full) for name in TRAINED]
)
def test_a_family_of_the_table_runs(
    workers: Callable[[int], WorkerGroup], material: Path, tmp_path: Path, model_type: str
) -> None:
    """All of a run: the plan of itself, with timed layers, a step, an evaluation, a checkpoint, an export."""
    config = build_published_config(model_type)
    text = shrink(getattr(config, TEXT_CONFIG, config))
    text.vocab_size = VOCAB_SIZE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(text).save_pretrained(tmp_path / "model")
    keys = (f"tokenizer_name_or_path={material}/tokenizer", f"eval_file={material}/eval.jsonl")
    keys += (f"output_dir={tmp_path}/out", f"data.cache_dir={material}/cache", "max_steps=1", "global_batch_size=2")
    workers(1).run(train_run, Case(tmp_path / "model", material / "train.jsonl", tmp_path, 1, 1, 1, keys))
    assert read_metrics(tmp_path / "out")[-1]["eval_loss"] > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")


def misbehave(model_type: str, train: bool) -> Trial:
    if model_type == "hangs":
        time.sleep(60)
    if model_type == "crashes":
        os._exit(3)
    return Trial("generic", 1e-9)


@pytest.mark.full
def test_a_family_that_hangs_or_crashes_is_a_row() -> None:
    found = try_families(["hangs", "works", "crashes", "too"], num_workers=1, seconds=1, trial=misbehave)
    assert list(found) == ["hangs", "works", "crashes", "too"]
    assert found["hangs"] == Trial("refused", reason="took longer than 1 s")
    assert found["crashes"] == Trial("refused", reason="its process ended with exit code 3")
    assert found["works"] == found["too"] == Trial("generic", 1e-9)


def test_a_row_that_has_changed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = f"before\n{list_models.START}\n{list_models.END}\nbehind\n"
    whole = Trial("generic", 1e-9, 2e-7, is_stacked=False)
    trials = {"a": Trial("generic", 1e-9, 2e-7), "b": Trial("refused", reason="says x | y"), "c": whole}
    page = list_models.replace_table(page, trials)
    assert page.startswith("before\n") and page.endswith("\nbehind\n")
    table = list_models.read_table(page)
    assert list_models.check(trials, table) == 0
    assert list_models.check({**trials, "a": Trial("refused", reason="broken")}, table) == 1
    assert capsys.readouterr().out == ("a: found ('refused', 'broken', ''), the table says ('generic', '', '')\n")
    assert list_models.check({**trials, "a": Trial("generic", 1e-9, 2e-7, 3e-7)}, table) == 1  # was not divided
    assert list_models.check({**trials, "c": Trial("generic", 1e-9, 2e-7)}, table) == 1  # was dense
    capsys.readouterr()


def test_the_page_names_the_families_with_weights_that_no_layer_reads() -> None:
    section = list_models.PAGE.read_text().split("ignores such names: ")[1].split(". Tested")[0]
    assert re.findall(r"`(\w+)`", section) == [
        name for name, (how, *_) in TABLE.items() if how in ("file", "generic") and ignores_weights(name)
    ]


def ignores_weights(model_type: str) -> bool:
    """Whether `transformers` ignores something of a published folder other than masks and rotary frequencies."""
    patterns = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]._keys_to_ignore_on_load_unexpected or ()
    return any(not re.search(r"bias$|inv_freq$|causal_mask$", pattern) for pattern in patterns)
