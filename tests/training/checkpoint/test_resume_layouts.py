"""A run saved at one layout continues at another as if it had never stopped: losses and gradient norms, on real
processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases import CONTEXT_PARALLEL, Case, build_engine, hf_weights, train_run
from support.families import save_family
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerError, WorkerGroup

from training.checkpoint.optimizer_state import FILE_PATTERN

LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "pp4": (4, 4), "pp1xdp2": (1, 2), "pp2xdp2": (2, 4)}  # stages, ranks
TENSOR_PARALLEL = {"tp2": (1, 2), "tp2xpp2": (2, 4)}  # each layer on two ranks
SHARDED = {f"stage{stage}xdp{ranks}": (1, ranks) for stage in (2, 3) for ranks in (2, 4)}  # zero_stage
SHARDED["stage2xpp2xdp2"] = (2, 4)
SHARDED |= {"stage1xdp4 by 2": (1, 4), "stage2xdp4 by 2": (1, 4)}  # sharding_parallel_size
STEPS_BEFORE, STEPS_AFTER = 2, 5
BOUND = 1e-5  # relative, fp32
IN_RING = {f"{layout} in a ring": sizes for layout, sizes in CONTEXT_PARALLEL.items()}  # context_parallel_mode=ring
IN_PARTS = {"tp2 in parts": (1, 2), "tp2xpp2 in parts": (2, 4)}  # sequence_parallel=true
# with expert_parallel_size=2 or 4, and where the name says so other keys; in "ep2xdp2" experts have two replicas
EXPERT_PARALLEL = {"ep2": (1, 2), "ep2xpp2": (2, 4), "ep2xcp2": (1, 2), "ep2xtp2": (1, 4), "stage2xep2": (1, 2)}
EXPERT_PARALLEL |= {"ep4": (1, 4), "ep2xdp2": (1, 4), "stage2xep2xdp2": (1, 4)}
ALL_LAYOUTS = LAYOUTS | TENSOR_PARALLEL | IN_PARTS | CONTEXT_PARALLEL | IN_RING | SHARDED | EXPERT_PARALLEL
EVERY_PAIR = [(saved, resumed) for saved in LAYOUTS for resumed in LAYOUTS if saved != resumed]
ACROSS = (*TENSOR_PARALLEL, "pp2", "pp1xdp2")
EVERY_PAIR += [
    pair for cp in CONTEXT_PARALLEL for other in ("pp2", "pp1xdp2", "tp2") for pair in ((cp, other), (other, cp))
]
EVERY_PAIR += [("cp2", "cp2xpp2"), ("cp2xpp2", "cp2")]
EVERY_PAIR += [(s, r) for s in ACROSS for r in ACROSS if s != r and {s, r} & TENSOR_PARALLEL.keys()]
# At 1e-2 whole runs at two layouts already differ by 7e-5 after seven steps: B starts at zero, and Adam makes steps of
# the noise in A's gradient.
LORA = ("adapter=lora", "adapter.r=4", "learning_rate=1e-3")
# None of these parameters is on every stage
GROUPS = ("parameter_groups=[{pattern: embed, learning_rate: 3e-3}, {pattern: 'layers[.][34]', weight_decay: 0}]",)
RADAM = "+optimizer.custom={_target_: torch.optim.RAdam, betas: [0.9, 0.95]}"
STATE_IN_BF16 = "optimizer.state_dtype=bf16"
OPTIMIZERS = {
    "adamw in bf16": ("tiedTrue", (STATE_IN_BF16,)),
    "lion": ("tiedTrue", ("optimizer=lion", "learning_rate=1e-4")),
    "radam": ("tiedTrue", ("optimizer=custom", RADAM)),
}
ROUNDED = "experts in bf16"
OPTIMIZER_PAIRS = [("pp2", "pp1xdp2"), ("pp1xdp2", "tp2"), ("tp2xpp2", "pp1"), ("pp2xdp2", "pp4")]
KINDS = {
    "untied": ("tiedFalse", ()),
    "tied": ("tiedTrue", ()),
    "lora": ("tiedFalse", LORA),
    "tied lora": ("tiedTrue", LORA),
    "groups": ("tiedTrue", GROUPS),
}  # model, overrides
EXPERTS = {"lora on experts": ("deepseek_v3", LORA), "experts": ("deepseek_v3", ()), "gpt_oss": ("gpt_oss", ())}
EXPERT_PAIRS = [
    ("tp2", "pp2"),
    ("pp2", "tp2"),
    ("pp1xdp2", "tp2xpp2"),
    ("pp4", "pp1xdp2"),
    ("tp2xpp2", "pp1"),
]
FEW = [  # off and onto each axis; a tied weight that two stages hold
    ("pp2xdp2", "pp1", "tied"),
    ("pp1", "pp2", "lora"),
    ("tp2", "pp1xdp2", "untied"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    for family in ("deepseek_v3", "gpt_oss"):
        save_tokenizer(save_family(root / family, family))
    save_records(root / "train.jsonl", 40)
    return root


@pytest.fixture(scope="module")
def run(workers: Callable[[int], WorkerGroup], root: Path) -> Callable[..., Path]:
    """run(name, layout, model, *overrides): its output_dir. The same run is not repeated."""
    done: dict[str, Path] = {}

    def start(name: str, layout: str, model: str, *overrides: str) -> Path:
        if name not in done:
            done[name] = root / name
            num_stages, world_size = ALL_LAYOUTS[layout]
            defaults = (
                f"tensor_parallel_size={2 if 'tp2' in layout else 1}",
                f"expert_parallel_size={divide_experts(layout)}",
                f"sequence_parallel={str(layout in IN_PARTS).lower()}",
                f"context_parallel_size={2 if 'cp2' in layout else 1}",
                f"context_parallel_mode={'ring' if layout in IN_RING else 'auto'}",
                f"zero_stage={layout[len('stage')] if layout.startswith('stage') else 1}",
                f"sharding_parallel_size={2 if layout.endswith('by 2') else 'null'}",
                f"output_dir={root / name}",
                "optimizer=adamw",
                "learning_rate=1e-3",
                "weight_decay=0.1",
                "max_grad_norm=1.0",
                "lr_scheduler_type=cosine",
                "warmup_ratio=0.2",
                "logging_steps=1",
                f"save_steps={STEPS_BEFORE}",
            )
            steps = STEPS_BEFORE + STEPS_AFTER
            case = Case(
                root / model, root / "train.jsonl", root, num_stages, world_size, steps, (*defaults, *overrides)
            )
            workers(world_size).run(train_run, case)
        return done[name]

    return start


def divide_experts(layout: str) -> int:
    """The expert_parallel_size of a layout."""
    return (4 if "ep4" in layout else 2) if layout in EXPERT_PARALLEL else 1


def read_steps(output_dir: Path, first: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step from `first` on."""
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"]) for record in records if record["step"] >= first]


def check(run: Callable[..., Path], saved: str, resumed: str, kind: str) -> None:
    model, overrides = (KINDS | EXPERTS | OPTIMIZERS | {ROUNDED: ("deepseek_v3", (STATE_IN_BF16,))})[kind]
    whole = run(f"{saved}-{kind}-whole", saved, model, *overrides)
    begun = whole / "checkpoints" / f"global_step{STEPS_BEFORE}"
    ended = run(f"{saved}-{kind}-at-{resumed}", resumed, model, *overrides, f"resume={begun}")
    expected, found = read_steps(whole, STEPS_BEFORE + 1), read_steps(ended, 1)
    assert len(found) == STEPS_AFTER  # it started where the other was saved
    for step, (a, b) in enumerate(zip(found, expected, strict=True), start=STEPS_BEFORE + 1):
        assert a == pytest.approx(b, rel=BOUND), f"step {step}"


@pytest.mark.parametrize("saved, resumed, kind", FEW, ids=str)
def test_another_layout_continues_with_the_same_losses_and_norms(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved, resumed", EVERY_PAIR, ids=str)
def test_every_layout_continues_at_every_other(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "saved, resumed",
    [
        ("tp2 in parts", "tp2"),
        ("tp2", "tp2 in parts"),
        ("tp2xpp2 in parts", "pp1xdp2"),
        ("pp2", "tp2xpp2 in parts"),
        ("tp2 in parts", "tp2xpp2 in parts"),
    ],
    ids=str,
)
def test_parts_of_sequences_leave_no_trace(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "saved, resumed",
    [
        ("cp2 in a ring", "cp2"),
        ("cp2", "cp2 in a ring"),
        ("cp2xpp2 in a ring", "pp1xdp2"),
        ("pp2", "cp2xpp2 in a ring"),
        ("tp2", "cp2 in a ring"),
    ],
    ids=str,
)
def test_rings_leave_no_trace(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


SHARDED_PAIRS = [
    ("stage3xdp2", "pp2"), ("pp2", "stage3xdp2"), ("stage2xdp2", "pp2"), ("pp2", "stage2xdp2"),
    ("stage3xdp4", "stage2xdp2"), ("stage2xdp2", "stage3xdp4"), ("pp4", "stage3xdp4"), ("stage3xdp2", "pp2xdp2"),
    ("stage2xpp2xdp2", "stage3xdp2"), ("stage2xdp4", "stage2xpp2xdp2"), ("stage2xpp2xdp2", "pp1"),
    ("stage1xdp4 by 2", "pp2"), ("pp1xdp2", "stage1xdp4 by 2"), ("stage2xdp4 by 2", "stage2xdp4"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
@pytest.mark.parametrize("saved, resumed", SHARDED_PAIRS, ids=str)
def test_zero_stages_continue_at_other_layouts(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


# Every pair of layouts one of which shards more than the optimizer's state, each with one kind of model in turn.
OTHERS = (*LAYOUTS, *TENSOR_PARALLEL, *CONTEXT_PARALLEL)
SHARDED_SIDES = [pair for one in SHARDED for other in OTHERS for pair in ((one, other), (other, one))]
SHARDED_SIDES += [(one, other) for one in SHARDED for other in SHARDED if one != other]


@pytest.mark.full
@pytest.mark.parametrize(
    "saved, resumed, kind",
    [(*pair, list(KINDS)[number % len(KINDS)]) for number, pair in enumerate(SHARDED_SIDES)],
    ids=str,
)
def test_zero_stages_continue_at_every_other_layout(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("saved, resumed", EXPERT_PAIRS, ids=str)
def test_mixtures_and_their_adapters_continue_at_another_layout(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


EXPERT_SIDES = [
    ("ep2", "pp2"), ("pp2", "ep2"), ("ep2", "ep2xpp2"), ("ep2xpp2", "pp1"), ("tp2", "ep2"), ("ep2xcp2", "tp2"),
    ("ep2xtp2", "ep2"), ("pp1xdp2", "ep2xtp2"), ("stage2xep2", "pp2xdp2"), ("ep2xpp2", "stage2xep2"),
    ("ep2xdp2", "pp2"), ("pp1xdp2", "ep2xdp2"),
    ("ep4", "ep2xpp2"), ("ep2", "ep4"), ("tp2", "ep2xcp2"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("saved, resumed", EXPERT_SIDES, ids=str)
def test_divided_experts_continue_at_every_other_layout(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize(
    "saved, resumed",
    [("ep2", "pp2"), ("pp1xdp2", "ep2xpp2"), ("ep2xpp2", "stage2xep2"), ("stage2xep2xdp2", "pp2"), ("pp2", "ep2xdp2")],
    ids=str,
)
def test_rounded_averages_of_divided_experts_continue(run, saved: str, resumed: str) -> None:
    check(run, saved, resumed, ROUNDED)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "saved, resumed",
    [pytest.param(*pair, marks=pytest.mark.full) for pair in OPTIMIZER_PAIRS],
    ids=str,
)
def test_each_optimizer_continues_at_another_layout(run, saved: str, resumed: str, kind: str) -> None:
    check(run, saved, resumed, kind)


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=bf16", STATE_IN_BF16),
        pytest.param(("precision=bf16", "offload_optimizer=cpu", "optimizer=adamw"), marks=pytest.mark.full),
    ],
    ids=["bf16", "offloaded"],
)
def test_state_and_weights_are_the_saved_bits_at_another_layout(
    run, root: Path, workers: Callable[[int], WorkerGroup], overrides: tuple[str, ...]
) -> None:
    """Losses in bf16 differ between layouts, whatever is resumed, since gradients are rounded at other points. So the
    state itself is compared."""
    begun = run(f"bits{len(overrides)}", "pp2xdp2", "tiedTrue", *overrides, f"stop_after_steps={STEPS_BEFORE}")
    step_dir = begun / "checkpoints" / f"global_step{STEPS_BEFORE}"
    saved = join(load_file(file) for file in sorted(step_dir.glob(FILE_PATTERN)))
    assert {key.split("/")[0] for key in saved} == {"weight", "exp_avg", "exp_avg_sq", "scalar"}

    num_stages, world_size = LAYOUTS["pp1xdp2"]
    reread = (*overrides, "optimizer=adamw", f"model_name_or_path={step_dir}")
    case = Case(step_dir, root / "train.jsonl", root, num_stages, world_size, overrides=reread)
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
def test_a_run_in_bf16_that_continues_in_fp32_keeps_its_fp32_weights(run, kind: str) -> None:
    """A step that changes nothing saves them as they were."""
    model, overrides = KINDS[kind]
    begun = run(f"bf16-{kind}", "pp2xdp2", model, *overrides, "precision=bf16", f"stop_after_steps={STEPS_BEFORE}")
    step_dir = begun / "checkpoints" / f"global_step{STEPS_BEFORE}"
    saved = join(load_file(file) for file in sorted(step_dir.glob(FILE_PATTERN)))
    still = ("precision=fp32", "learning_rate=0", "stop_after_steps=1", "resume_allow_changes=true")
    ended = run(f"fp32-{kind}", "pp2", model, *overrides, *still, f"resume={step_dir}")
    files = sorted((ended / "checkpoints" / f"global_step{STEPS_BEFORE + 1}").glob("layer_*.pt"))
    kept = {tensor.flatten().numpy().tobytes() for file in files for tensor in torch.load(file).values()}
    masters = [tensor for name, tensor in saved.items() if name.startswith("weight/")]
    assert masters and all(tensor.numpy().tobytes() in kept for tensor in masters)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "named"),
    [(GROUPS, "parameter_groups was none, is \\["), ((STATE_IN_BF16,), "optimizer.state_dtype was none, is bf16")],
    ids=["groups", "state"],
)
def test_other_groups_or_averages_continue_when_allowed(run, changed: tuple[str, ...], named: str) -> None:
    whole = run("pp2-tied-whole", "pp2", "tiedTrue")
    resume = f"resume={whole}/checkpoints/global_step{STEPS_BEFORE}"
    with pytest.raises(WorkerError, match=named):
        run(f"refused-{named.split()[0]}", "pp2", "tiedTrue", *changed, resume)
    ended = run(f"allowed-{named.split()[0]}", "pp2", "tiedTrue", *changed, resume, "resume_allow_changes=true")
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
    run, root: Path, workers: Callable[[int], WorkerGroup], begun: str, resumed: str, model: str
) -> None:
    """Blocks have other boundaries, so the saved state is quantized again; at the same layout it is the same bits."""
    create_map = pytest.importorskip("bitsandbytes.functional").create_dynamic_map
    out = run(f"eight-{begun}-{model}", begun, model, *EIGHT_BITS, f"stop_after_steps={STEPS_BEFORE}")
    step_dir = out / "checkpoints" / f"global_step{STEPS_BEFORE}"
    saved = [load_file(file) for file in sorted(step_dir.glob(FILE_PATTERN))]
    num_stages, world_size = ALL_LAYOUTS[resumed]
    parallel = (
        f"tensor_parallel_size={2 if resumed in TENSOR_PARALLEL else 1}",
        f"expert_parallel_size={divide_experts(resumed)}",
    )
    reread = (*EIGHT_BITS, *parallel, f"model_name_or_path={step_dir}")
    case = Case(step_dir, root / "train.jsonl", root, num_stages, world_size, overrides=reread)
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
