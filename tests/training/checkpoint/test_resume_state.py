"""The state that a resume reads back: the bits that were saved, or within a step of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case, build_engine, hf_weights
from support.resuming import (
    ALL_LAYOUTS,
    BOUND,
    GROUPS,
    KINDS,
    LAYOUTS,
    STATE_IN_BF16,
    STEPS_BEFORE,
    TENSOR_PARALLEL,
    divide_experts,
    read_steps,
)
from support.workers import WorkerError, WorkerGroup

from training.checkpoint.optimizer_state import FILE_PATTERN


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=bf16", STATE_IN_BF16),
        pytest.param(("precision=bf16", "offload_optimizer=cpu", "optimizer=adamw"), marks=pytest.mark.full),
    ],
    ids=["bf16", "offloaded"],
)
def test_state_and_weights_are_the_saved_bits_at_another_layout(
    run_at, layout_root: Path, workers: Callable[[int], WorkerGroup], overrides: tuple[str, ...]
) -> None:
    """Losses in bf16 differ between layouts, whatever is resumed, since gradients are rounded at other points. So the
    state itself is compared."""
    begun = run_at(f"bits{len(overrides)}", "pp2xdp2", "tiedTrue", *overrides, f"stop_after_steps={STEPS_BEFORE}")
    step_dir = begun / "checkpoints" / f"global_step{STEPS_BEFORE}"
    saved = join(load_file(file) for file in sorted(step_dir.glob(FILE_PATTERN)))
    assert {key.split("/")[0] for key in saved} == {"weight", "exp_avg", "exp_avg_sq", "scalar"}

    num_stages, world_size = LAYOUTS["pp1xdp2"]
    reread = (*overrides, "optimizer=adamw", f"model_name_or_path={step_dir}")
    case = Case(step_dir, layout_root / "train.jsonl", layout_root, num_stages, world_size, overrides=reread)
    results = workers(world_size).run(reload_state, case, step_dir)
    found = join(state for state, _ in results)
    assert found.keys() == saved.keys() and found["scalar/step"].item() == STEPS_BEFORE
    assert all(torch.equal(found[key], saved[key]) for key in saved)
    for _, weights in results:
        assert all(
            torch.equal(weight.flatten(), saved[f"weight/{name}"].bfloat16().float())
            for name, weight in weights.items()
        )


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_a_run_in_bf16_that_continues_in_fp32_keeps_its_fp32_weights(run_at, kind: str) -> None:
    """A step that changes nothing saves them as they were."""
    model, overrides = KINDS[kind]
    begun = run_at(f"bf16-{kind}", "pp2xdp2", model, *overrides, "precision=bf16", f"stop_after_steps={STEPS_BEFORE}")
    step_dir = begun / "checkpoints" / f"global_step{STEPS_BEFORE}"
    saved = join(load_file(file) for file in sorted(step_dir.glob(FILE_PATTERN)))
    still = ("precision=fp32", "learning_rate=0", "stop_after_steps=1", "resume_allow_changes=true")
    ended = run_at(f"fp32-{kind}", "pp2", model, *overrides, *still, f"resume={step_dir}")
    files = sorted((ended / "checkpoints" / f"global_step{STEPS_BEFORE + 1}").glob("layer_*.pt"))
    kept = {tensor.flatten().numpy().tobytes() for file in files for tensor in torch.load(file).values()}
    masters = [tensor for name, tensor in saved.items() if name.startswith("weight/")]
    assert masters and all(tensor.numpy().tobytes() in kept for tensor in masters)


def test_a_run_in_fp32_that_continues_in_bf16_keeps_its_fp32_weights(
    run_at, layout_root: Path, workers: Callable[[int], WorkerGroup]
) -> None:
    """The weights that passes run with are rounded; those that the optimizer updates are not."""
    begun = run_at("fp32 alone", "pp1xdp2", "tiedTrue", f"stop_after_steps={STEPS_BEFORE}")
    step_dir = begun / "checkpoints" / f"global_step{STEPS_BEFORE}"
    saved = [tensor for file in step_dir.glob("layer_*.pt") for tensor in torch.load(file).values()]
    keys = ("precision=bf16", "optimizer=adamw", f"model_name_or_path={step_dir}")
    case = Case(step_dir, layout_root / "train.jsonl", layout_root, *LAYOUTS["pp2"], overrides=keys)
    results = workers(2).run(reload_state, case, step_dir)
    found = join(state for state, _ in results)
    masters = {tensor.numpy().tobytes() for key, tensor in found.items() if key.startswith("weight/")}
    assert masters == {tensor.flatten().numpy().tobytes() for tensor in saved}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "named"),
    [(GROUPS, "parameter_groups was none, is \\["), ((STATE_IN_BF16,), "optimizer.state_dtype was none, is bf16")],
    ids=["groups", "state"],
)
def test_other_groups_or_averages_continue_when_allowed(run_at, changed: tuple[str, ...], named: str) -> None:
    whole = run_at("pp2-tied-whole", "pp2", "tiedTrue")
    resume = f"resume={whole}/checkpoints/global_step{STEPS_BEFORE}"
    with pytest.raises(WorkerError, match=named):
        run_at(f"refused-{named.split()[0]}", "pp2", "tiedTrue", *changed, resume)
    ended = run_at(f"allowed-{named.split()[0]}", "pp2", "tiedTrue", *changed, resume, "resume_allow_changes=true")
    expected, found = read_steps(whole, STEPS_BEFORE + 1), read_steps(ended, 1)
    assert found[0][0] == pytest.approx(expected[0][0], rel=BOUND)  # depends on weights; the next one on moments too
    losses = [[loss for loss, _ in steps] for steps in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05) and losses[0] != losses[1]


EIGHT_BITS = ("precision=bf16", "optimizer=adamw_8bit")


@pytest.mark.full
@pytest.mark.parametrize(
    ("begun", "resumed", "model"),
    [
        *(("pp2xdp2", resumed, "tiedTrue") for resumed in ("pp2xdp2", "pp1xdp2", "pp1", "pp4", "tp2")),
        *(("ep2xpp2", resumed, "deepseek_v3") for resumed in ("ep2xpp2", "pp1xdp2")),
        ("pp1xdp2", "ep2", "deepseek_v3"),
        ("ep2xdp2", "ep2xdp2", "deepseek_v3"),
        ("ep2xdp2", "pp1xdp2", "deepseek_v3"),
    ],
)
def test_state_in_8_bits_is_there_within_a_step_at_another_layout(
    run_at, layout_root: Path, workers: Callable[[int], WorkerGroup], begun: str, resumed: str, model: str
) -> None:
    """Blocks have other boundaries, so the saved state is quantized again; at the same layout it is the same bits."""
    create_map = pytest.importorskip("bitsandbytes.functional").create_dynamic_map
    out = run_at(f"eight-{begun}-{model}", begun, model, *EIGHT_BITS, f"stop_after_steps={STEPS_BEFORE}")
    step_dir = out / "checkpoints" / f"global_step{STEPS_BEFORE}"
    saved = [load_file(file) for file in sorted(step_dir.glob(FILE_PATTERN))]
    num_stages, world_size = ALL_LAYOUTS[resumed]
    parallel = (
        f"tensor_parallel_size={2 if resumed in TENSOR_PARALLEL else 1}",
        f"expert_parallel_size={divide_experts(resumed)}",
    )
    reread = (*EIGHT_BITS, *parallel, f"model_name_or_path={step_dir}")
    case = Case(step_dir, layout_root / "train.jsonl", layout_root, num_stages, world_size, overrides=reread)
    found = [state for state, _ in workers(world_size).run(reload_state, case, step_dir)]
    if resumed == begun:
        for one, other in zip(found, saved, strict=True):  # codes: below, since in a block of zeros they say nothing
            assert all(torch.equal(one[key], other[key]) for key in one if not key.startswith("state"))
        for number, signed in ((1, True), (2, False)):
            before, after = (unite_blocks(parts, number, create_map(signed=signed)) for parts in (saved, found))
            assert before.keys() == after.keys() and len(before) > 40
            assert all(torch.equal(values, after[name][0]) for name, (values, _) in before.items())
        return
    assert found[0]["scalar/step@0"].item() == STEPS_BEFORE
    for number, signed in ((1, True), (2, False)):
        before, after = (unite_blocks(parts, number, create_map(signed=signed)) for parts in (saved, found))
        steps = create_map(signed=signed).diff().max()
        assert before.keys() == after.keys() and len(before) > 40
        for name, (values, _) in before.items():
            again, scales = after[name]
            assert ((values - again).abs() <= steps * scales).all(), name
            assert values.abs().sum() > 0


def unite_blocks(
    parts: list[dict[str, torch.Tensor]], number: int, table: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The values of whole parameters, and the scale of each; the elements of a sharded one are in some order."""
    from models.parallel.shard import ShardLayout
    from training.checkpoint.blockwise_state import BlockRun
    from training.checkpoint.optimizer_state import _list_runs, parse_key

    pieces: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    for part in parts:
        for key, scales in part.items():
            kind, _, label = key.partition("/")
            if kind.startswith(f"absmax{number}+"):
                block_run = BlockRun(part[f"state{number}/{label}"], scales, int(kind.partition("+")[2]))
                _, name, shard, start = parse_key(key)
                assert shard is None or isinstance(shard, ShardLayout)
                values, spread = block_run.dequantize(table), block_run.spread_scales()
                for low, whole, length in _list_runs(shard, start, values.numel(), is_same=False):
                    taken = slice(low, low + length)
                    pieces.setdefault(name, []).append((whole, values[taken], spread[taken]))
    united = {}
    for name, found in pieces.items():
        found.sort(key=lambda piece: piece[0])
        united[name] = tuple(torch.cat([piece[column] for piece in found]) for column in (1, 2))
    return united


def reload_state(case: Case, step_dir: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """On each rank: the optimizer's state after a resume, by its names in the files; and the weights of the model."""
    from training.checkpoint.optimizer_state import collect_state
    from training.checkpoint.state import load_checkpoint, read_state

    engine, *_ = build_engine(case)
    load_checkpoint(engine, step_dir, read_state(step_dir))
    state = {key: tensor.clone() for key, tensor in collect_state(engine).items()}
    return state, hf_weights(engine)


def join(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole flattened tensors from the fragments of all ranks; they must meet end to end."""
    fragments: dict[str, dict[int, torch.Tensor]] = {}
    for part in parts:
        for key, tensor in part.items():
            name, _, start = key.rpartition("@")
            fragments.setdefault(name, {})[int(start)] = tensor
    whole = {}
    for name, pieces in fragments.items():
        starts = sorted(pieces)
        assert all(
            start == (0 if i == 0 else starts[i - 1] + len(pieces[starts[i - 1]])) for i, start in enumerate(starts)
        ), name
        whole[name] = torch.cat([pieces[start] for start in starts])
    return whole
