"""Layers sharded over ranks give the same gradients, steps and logits as the plain Hugging Face model in one process;
alone, and with stages and replicas."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    SELECTIVE,
    Case,
    mean_loss,
    merge,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.families import FAMILIES, has_sharding_plan, save_family
from support.parity_table import LARGE, logits_on_rank
from support.published import build_published_config
from support.runs import eval_dataset, read_metrics
from support.tiny import VOCAB_SIZE, save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM

from models.generic.shrink import shrink

LAYOUTS = {"tp2": (2, 1, 2), "tp2xpp2": (2, 2, 4), "tp2xdp2": (2, 1, 4)}  # tensor_parallel_size, stages, ranks
CUT = sorted(filter(has_sharding_plan, FAMILIES))
GRADIENTS = (f"learning_rate={LARGE}", "max_grad_norm=0")
STEPS = ("learning_rate=0.5", CLIPPED)
FAST = [("llama", "tp2", False), ("qwen3", "tp2xpp2", False), ("llama", "tp2xpp2", True), ("qwen2", "tp2xdp2", True)]
FAST += [(family, "tp2", True) for family in ("deepseek_v3", "gemma2", "gpt2", "mpt", "olmo2", "phi3")]
LORA_FAST = FAST[:1]
LORA_REST = [("mixtral", "tp2", False), ("glm4_moe", "tp2xpp2", False)]
REST = [(f, layout, tied) for f in CUT for layout in LAYOUTS for tied in (False, True) if (f, layout, tied) not in FAST]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(family, layout, tied, *overrides, steps): its model is made on first use, the records once."""
    root = tmp_path_factory.mktemp("tensor_parallel")
    records = save_records(root / "train.jsonl", 40)
    save_tokenizer(root / "tokenizer")

    def case(family: str, layout: str, tied: bool, *overrides: str, steps: int = 5, **fields: float) -> Case:
        folder = root / f"{family}-{tied}-{'-'.join(map(str, fields.values()))}"
        if not folder.exists():
            save_family(folder, family, tied=tied, **fields)
        size, num_stages, world_size = LAYOUTS[layout]
        given = (f"tokenizer_name_or_path={root}/tokenizer", f"tensor_parallel_size={size}", *overrides)
        return Case(folder, records, root, num_stages, world_size, steps, given)

    return case


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


CASES = [pytest.param(*case) for case in FAST] + [pytest.param(*case, marks=pytest.mark.full) for case in REST]


@pytest.mark.parametrize(("family", "layout", "tied"), CASES)
def test_gradients_equal_hugging_face(workers, material, family: str, layout: str, tied: bool) -> None:
    """One step so long that the new weights are the gradients."""
    compare(workers, material(family, layout, tied, *GRADIENTS, steps=1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "layout", "tied", "overrides"),
    [
        pytest.param(*case, overrides, id=f"{case[0]}-{case[1]}-{case[2]}-{name}")
        for name, overrides, cases in (
            ("checkpointed", (CHECKPOINTED,), FAST + REST),
            ("plain", (), FAST),
            ("selective", SELECTIVE, FAST),
        )
        for case in cases
    ],
)
def test_five_sgd_steps_equal_hugging_face(
    workers, material, family: str, layout: str, tied: bool, overrides: tuple[str, ...]
) -> None:
    compare(workers, material(family, layout, tied, *STEPS, *overrides))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f == "llama" else pytest.mark.full)
        for f in CUT
        if f not in ("gpt2", "gpt_oss", "mpt")
    ],
)  # two have no such key, and one keeps pairs of neurons together
def test_five_clipped_checkpointed_steps_with_an_uneven_vocabulary(workers, material, family: str) -> None:
    """Neither the vocabulary nor the inner neurons divide; nothing is padded."""
    case = material(family, "tp2", False, *STEPS, CHECKPOINTED, vocab_size=VOCAB_SIZE + 1, intermediate_size=81)
    compare(workers, case)


@pytest.mark.parametrize(
    ("family", "layout", "tied"),
    [pytest.param(*c, marks=() if c in LORA_FAST else pytest.mark.full) for c in FAST + REST + LORA_REST],
)
def test_lora_equals_peft(workers, material, tmp_path: Path, family: str, layout: str, tied: bool) -> None:
    given = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", CHECKPOINTED, *STEPS)
    case = material(family, layout, tied, *given)
    model = make_adapter(tmp_path / "adapter", case.model)
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case, model)
    worst, name = worst_difference(*to_peft_weights(result, oracle, model.config))
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


@pytest.mark.full
@pytest.mark.parametrize(("family", "layout", "tied"), FAST + REST)
def test_logits_equal_hugging_face(workers, material, family: str, layout: str, tied: bool) -> None:
    """Each rank's logits are those of its own tokens."""
    case = material(family, layout, tied, steps=1)
    input_ids = torch.randint(3, VOCAB_SIZE, (3, 40), generator=torch.Generator().manual_seed(1))
    results = [logits for logits in workers(case.world_size).run(logits_on_rank, case, input_ids) if logits is not None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(case.model).eval()(input_ids, use_cache=False).logits
    found = torch.cat(results[:2], dim=-1)
    assert ((found - expected).abs().max() / expected.abs().max()).item() < BOUND


def test_a_run_exports_what_it_has_trained_and_evaluates_it_again(workers, material, tmp_path: Path) -> None:
    """With replicas, and a vocabulary that is sharded unevenly; the export is that of any other run."""
    save_records(tmp_path / "eval.jsonl", 11, seed=1)
    given = (
        f"output_dir={tmp_path}/out",
        f"data.cache_dir={tmp_path}/cache",
        f"eval_file={tmp_path}/eval.jsonl",
        "max_steps=2",
        *STEPS,
    )
    case = material("llama", "tp2xdp2", True, *given, vocab_size=VOCAB_SIZE + 1)
    workers(case.world_size).run(train_run, case)
    reported = read_metrics(tmp_path / "out")[-1]
    loss, num_targets = mean_loss(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf"), eval_dataset(tmp_path))
    assert reported["eval_tokens"] == num_targets and reported["eval_loss"] == pytest.approx(loss, rel=BOUND)
    workers(case.world_size).run(
        train_run, replace(case, overrides=(*case.overrides, "evaluate_only=true", "resume=latest"))
    )
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["eval_loss"] == pytest.approx(loss, rel=BOUND)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ranks_have_in_common_counts_once_in_bf16(workers, material, layout: str) -> None:
    """Norms alone are trained, whole on each rank, those of Qwen 3's heads from gradients that are summed: counted
    twice they would give 1.41 times."""
    frozen = "freeze=[proj,embed_tokens,lm_head]"
    case = material("qwen3", layout, False, frozen, "learning_rate=0.01", CLIPPED)
    model = AutoModelForCausalLM.from_pretrained(case.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    result = merge(
        workers(case.world_size).run(train_case, replace(case, overrides=(*case.overrides, "precision=bf16")))
    )
    assert result["norms"] == pytest.approx(train_oracle(case, model)["norms"], rel=0.03)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_leaves_ranks_alike_and_is_recomputed_as_it_was(workers, material, family: str) -> None:
    """`merge` sees that what ranks have in common stays equal to the bit."""
    shares = (
        {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1} if family == "gpt2" else {"attention_dropout": 0.3}
    )
    kept, recomputed, plain = (
        merge(workers(2).run(train_case, material(family, "tp2", False, *STEPS, *overrides, **fields)))
        for overrides, fields in (((), shares), ((CHECKPOINTED,), shares), ((), {}))
    )
    assert worst_difference(recomputed["weights"], kept["weights"])[0] < BOUND
    assert worst_difference(plain["weights"], kept["weights"])[0] > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("overrides", [(), (CHECKPOINTED,)], ids=["kept", "recomputed"])
def test_routers_with_jitter_draw_what_one_process_draws(workers, material, overrides: tuple[str, ...]) -> None:
    sharded = material("mixtral", "tp2", False, *STEPS, *overrides, router_jitter_noise=0.3)
    alone = (*sharded.overrides, "tensor_parallel_size=1")
    whole, plain = (
        replace(sharded, model=model, world_size=1, overrides=alone)
        for model in (sharded.model, material("mixtral", "tp2", False).model)
    )
    found, expected, others = (
        merge(workers(case.world_size).run(train_case, case)) for case in (sharded, whole, plain)
    )
    assert worst_difference(found["weights"], expected["weights"])[0] < BOUND
    assert worst_difference(others["weights"], expected["weights"])[0] > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["smollm3", "arcee", "seed_oss", "nanochat"])
def test_a_family_without_a_file_is_cut_by_its_published_plan(
    workers, material, tmp_path: Path, model_type: str
) -> None:
    config = shrink(build_published_config(model_type))
    config.vocab_size = VOCAB_SIZE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    compare(workers, replace(material("llama", "tp2", False, *GRADIENTS, steps=1), model=tmp_path / "model"))
