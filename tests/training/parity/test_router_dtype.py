"""Runs in bf16 with routers in fp32 (`moe.router_dtype`) through real stages: against the plain Hugging Face model with
the same gates, and what they report of the other precision against a plain count."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import CHECKPOINTED, SELECTIVE, Case, merge, train_case, train_oracle
from support.families import save_family
from support.parity_table import LARGE
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from torch import nn
from transformers import AutoModelForCausalLM

LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {  # stages, ranks, keys
    "pp1": (1, 1, ()),
    "pp2": (2, 2, ()),
    "ep2": (1, 2, ("expert_parallel_size=2",)),
    "tp2": (1, 2, ("tensor_parallel_size=2",)),
    "zero2": (1, 2, ("zero_stage=2",)),
    "zero3": (1, 2, ("zero_stage=3",)),
    "ep2xpp2": (2, 4, ("expert_parallel_size=2",)),
}
FP32 = "moe.router_dtype=fp32"
ZERO_BUBBLE = "schedule=zero_bubble"
full = pytest.mark.full


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(family, layout, *overrides, steps): a run in bf16."""
    root = tmp_path_factory.mktemp("router-dtype")
    records = save_records(root / "train.jsonl", 40)
    save_tokenizer(root / "tokenizer")

    def case(family: str, layout: str, *overrides: str, steps: int = 1) -> Case:
        folder = root / family
        if not folder.exists():
            save_family(folder, family, tied=False)
        num_stages, world_size, keys = LAYOUTS[layout]
        given = (f"tokenizer_name_or_path={root}/tokenizer", "precision=bf16", f"learning_rate={LARGE}")
        return Case(folder, records, root, num_stages, world_size, steps, (*given, *keys, *overrides))

    return case


class Gate(nn.Module):
    """A router of `transformers` whose parameters are in bf16, and which computes by its copy in fp32."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: torch.Tensor) -> Any:
        exact = {name: tensor.float() for name, tensor in self.router.state_dict(keep_vars=True).items()}
        return torch.func.functional_call(self.router, exact, (x.float(),))


def train_plain(case: Case, in_bf16: bool = True) -> dict[str, torch.Tensor]:
    """Train the Hugging Face model, in bf16 with gates in fp32, or all in fp32 from the same weights. Returns its
    losses, norms, and the new weights of its gates, end to end."""
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.bfloat16)
    if in_bf16:
        routers = [name for name, part in model.named_modules() if type(part).__name__.lower().endswith("topkrouter")]
        for parent, _, own in (name.rpartition(".") for name in routers):
            setattr(model.get_submodule(parent), own, Gate(model.get_submodule(f"{parent}.{own}")))
    else:
        model.float()
    plain = tuple(key for key in case.overrides if key.startswith(("tokenizer", "learning_rate")))
    return summarize(train_oracle(replace(case, num_stages=1, world_size=1, overrides=plain), model))


def summarize(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    weights = {re.sub(r"(\.(gate|router))+\.", ".", name): each for name, each in result["weights"].items()}
    gates = [name for name in sorted(weights) if name.endswith(("mlp.weight", "mlp.bias"))]
    assert gates
    summary = {name: torch.tensor(result[name]) for name in ("losses", "norms")}
    return {**summary, "gates": torch.cat([weights[name].float().flatten() for name in gates])}


@pytest.mark.parametrize(
    ("family", "layout", "overrides"),
    [
        ("qwen3_moe", "ep2", (CHECKPOINTED,)),
        ("gpt_oss", "pp2", (ZERO_BUBBLE, CHECKPOINTED)),
        ("deepseek_v3", "pp1", SELECTIVE),
        *(
            pytest.param(family, layout, overrides, marks=full)
            for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")
            for layout, overrides in (
                ("pp1", ()),
                ("tp2", ()),
                ("zero2", (CHECKPOINTED,)),
                ("zero3", (CHECKPOINTED,)),
                ("ep2xpp2", (ZERO_BUBBLE, *SELECTIVE)),
            )
        ),
        pytest.param("gpt_oss", "tp2", ("sequence_parallel=true",), marks=full),
        pytest.param(
            "qwen3_moe", "pp1", ("compile=true", "data.pad_to=max_seq_length"),
            marks=[full, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")],
        ),
    ],
)  # fmt: skip
def test_bf16_is_hugging_faces_with_the_same_gates(
    workers: Callable[[int], WorkerGroup], material, family: str, layout: str, overrides: tuple[str, ...]
) -> None:
    """One step so long that the new weights are the gradients. How far two right programs in bf16 may be apart, which
    send tokens elsewhere where hidden states differ by rounding, is seen by how far one of them is from fp32."""
    case = material(family, layout, FP32, *overrides)
    found = summarize(merge(workers(case.world_size).run(train_case, case)))
    plain = train_plain(case)
    torch.testing.assert_close(found["losses"], plain["losses"], rtol=1e-2, atol=0)
    torch.testing.assert_close(found["norms"], plain["norms"], rtol=5e-2, atol=0)
    exact = train_plain(case, in_bf16=False)["gates"]
    apart, rounded = (found["gates"] - plain["gates"]).norm(), (plain["gates"] - exact).norm()
    assert apart < 1.5 * rounded < 0.5 * exact.norm()


def train_and_count(case: Case) -> dict[str, Any]:
    """As `train_case`, with plain counts: tokens by layer, those that logits rounded to bf16 would send elsewhere, and
    the dtype of logits."""
    from models.experts.router import find_block
    from training.pipeline import module as stages
    from training.pipeline.weight_sharding import whole_shape

    counts: dict[int, list[int]] = {}
    dtypes = set()

    def watch(layer: Any, router: nn.Module, args: Any, outputs: Any) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not when it is recomputed
            with torch.no_grad():
                count_tokens(layer, router, args, outputs)

    def count_tokens(layer: Any, router: nn.Module, args: Any, outputs: Any) -> None:
        logits = nn.functional.linear(args[0].detach().float(), router.weight.float()).flatten(0, -2)
        if hasattr(router, "bias"):
            logits += router.bias.float()
        exact, rounded = (each.topk(outputs[2].shape[1]).indices for each in (logits, logits.bfloat16().float()))
        count = counts.setdefault(layer.layer_idx, [0, 0])
        for one, other, is_real in zip(exact.tolist(), rounded.tolist(), layer.context.tokens.is_real, strict=True):
            count[0] += bool(is_real) and set(one) != set(other)
            count[1] += bool(is_real)
        dtypes.add(outputs[0].dtype)

    prepare = stages.prepare_layers

    def prepare_watched(layers: Any, *given: Any) -> Any:
        prepared = prepare(layers, *given)
        for layer in layers:
            block = find_block(layer.module, whole_shape)
            if block is not None:
                block.router.register_forward_hook(partial(watch, layer.module))
        return prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "prepare_layers", prepare_watched)
        return {"routed": train_case(case)["routed"], "counts": counts, "dtypes": dtypes}


@pytest.mark.parametrize(
    ("family", "layout", "overrides", "dtype"),
    [
        ("qwen3_moe", "ep2", (FP32, CHECKPOINTED), torch.float32),
        pytest.param("qwen3_moe", "pp2", (CHECKPOINTED,), torch.bfloat16, marks=full),
        pytest.param("qwen3_moe", "pp2", (FP32, ZERO_BUBBLE, *SELECTIVE), torch.float32, marks=full),
        pytest.param("qwen3_moe", "pp1", SELECTIVE, torch.bfloat16, marks=full),
        pytest.param("gpt_oss", "tp2", (FP32,), torch.float32, marks=full),
        pytest.param("qwen3_moe", "zero3", (FP32,), torch.float32, marks=full),
    ],
)
def test_other_choices_are_those_of_a_plain_count(
    workers, material, family: str, layout: str, overrides: tuple[str, ...], dtype: torch.dtype
) -> None:
    case = material(family, layout, "logging_steps=1", *overrides, steps=2)
    case = replace(case, overrides=(*case.overrides, "learning_rate=0.05"))
    results = workers(case.world_size).run(train_and_count, case)
    expected: dict[int, list[int]] = {}
    for result in results:
        assert result["dtypes"] <= {dtype} and result["routed"] == results[0]["routed"]
        for layer, count in result["counts"].items():
            expected[layer] = [sum(pair) for pair in zip(expected.get(layer, [0, 0]), count, strict=True)]
    reported = results[0]["routed"]["router_other_choices"]
    found = {layer: share for layer, share in enumerate(reported) if share is not None}
    assert found == pytest.approx({layer: moved / tokens for layer, (moved, tokens) in sorted(expected.items())})
    assert any(moved for moved, _ in expected.values())
