"""The table of `benchmarks/gpu_window.py`: what is run on a GPU whose time is short, in order, each with its question.

Expected seconds are those on an H200 with 16 cores, also of a row that runs next to others. What a first quarter of an
hour should answer comes first; the report says in which call of `--budget` each item fits. tests/test_gpu_window.py
holds the table to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.gpu_parts.cases import ADDED_CASES, CASES, TASKS, Case
from benchmarks.gpu_parts.rows import count_jobs
from benchmarks.gpu_parts.shapes import PUBLISHED

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


@dataclass(frozen=True)
class DeviceCheck:
    """A matrix product: is it right, and what does the device reach."""


@dataclass(frozen=True)
class TransferCheck:
    """A check of `transfers.py`. arguments: its command line. hangs: whether it is predicted to. needs: as in
    `cases.Case`; gloo hangs in none of these, and knows nothing of launches."""

    arguments: tuple[str, ...]
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A model whose speed is measured. shape: a key of `shapes.SHAPES`. choices: further overrides, of which the first
    that fit by the plan are taken. traced: whether a further step is traced. times_longer: how many times the length
    of other variants its rows have; a step has as many times fewer of them, so it has the same tokens."""

    shape: str
    overrides: tuple[str, ...] = ()
    choices: tuple[tuple[str, ...], ...] = ((),)
    traced: bool = False
    times_longer: int = 1


@dataclass(frozen=True)
class Item:
    """A row of the table. seconds: expected."""

    name: str
    question: str
    seconds: float
    task: DeviceCheck | TransferCheck | Case | Variant


@dataclass(frozen=True)
class Section:
    """Items that follow each other. cores: of the host per item where they run side by side; None: one at a time."""

    items: tuple[Item, ...]
    cores: int | None = None

    def count_jobs(self) -> int:
        """Returns how many run side by side."""
        return 1 if self.cores is None else min(count_jobs(self.cores), len(self.items))


def _find_case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _case(name: str, question: str) -> Item:
    return Item(name, question, 40, _find_case(name))


def _replay(name: str, question: str, stages: int, waits: bool = False, replicas: int = 1, **environment: str) -> Item:
    arguments = "replay", str(stages), str(int(waits))
    task = TransferCheck(arguments, stages * replicas, environment, needs=("gpu",) if environment else ())
    return Item(f"transfers, {name}", question, 20, task)


def _group(
    name: str, question: str, layout: str, elements: int, hangs: bool = False, kind: str = "group", **environment: str
) -> Item:
    needs_gpu = hangs or kind == "abort"
    task = TransferCheck((kind, layout, str(elements)), 2, environment, hangs, needs=("gpu",) if needs_gpu else ())
    return Item(f"transfers, {name}", question, 20, task)


def _slice(name: str, question: str, *overrides: str, seconds: float = 9, traced: bool = False) -> Item:
    return Item(f"8 layers{name}", question, seconds, Variant("8b stage", overrides, traced=traced))


def _experts(name: str, question: str, *overrides: str) -> Item:
    return Item(f"4 layers of experts{name}", question, 12, Variant("30b stage", overrides))


def _list_layers(model: str, shape: str) -> Iterator[Item]:
    """A layer of a mixture under LoRA, in bf16 and in each form, at two micro-batches."""
    forms: dict[str, tuple[str, tuple[str, ...]]] = {
        "bf16": (shape, ()),
        "nf4": (shape, ("adapter.load_in_4bit=true",)),
    }
    forms |= {form: (f"{shape} in {form}", ("adapter.keep_quantized=true",)) for form in PUBLISHED}
    for form, (its_shape, keys) in forms.items():
        question = f"How fast is a layer of {model} with frozen experts in {form}, and is the plan?"
        for size in (1, 2):
            variant = Variant(its_shape, (*LORA, KEEP_ALL, f"micro_batch_size={size}", *keys))
            yield Item(f"layer of {model}, {form}, micro-batches of {size}", question, 6, variant)


def _list_indexed() -> Iterator[Item]:
    """A layer whose indexer selects 2,048 keys, at two lengths."""
    overrides = (*LORA, "adapter.target_parameters=[]", KEEP_ALL)
    for times in (1, 4):
        length = f"{4096 * times:,}"
        question = f"How fast is a layer of DeepSeek-V3.2 in rows of {length} tokens, forward and backward?"
        yield Item(
            f"layer of DeepSeek-V3.2, {length} tokens", question, 6,
            Variant("deepseek 3.2 layer", overrides, times_longer=times),
        )  # fmt: skip


KEEP_ALL, SELECTIVE = "activation_checkpoint_interval=0", "activation_checkpoint_mode=selective"
FUSED, COMPILED, TWO_ROWS = "fused_kernels=auto", "compile=true", "micro_batch_size=2"
BF16_STATES, EIGHT_BITS, OFFLOAD = "optimizer.state_dtype=bf16", "optimizer=adamw_8bit", "offload_optimizer=cpu"
EVERY_SECOND = ("activation_checkpoint_interval=2", "activation_checkpoint_mode=every")
UNLOGGED = "logging_steps=1000"
LORA, QKV = ("adapter=lora",), "adapter.target_modules=[q_proj,k_proj,v_proj]"
# The fastest comes first; kernels are fused where the machine has them
_FULL = (
    (FUSED, KEEP_ALL, BF16_STATES), (FUSED, SELECTIVE, BF16_STATES), (FUSED, BF16_STATES), (FUSED, EIGHT_BITS),
    (FUSED, OFFLOAD),
)  # fmt: skip
_AS_THE_MARK = ((BF16_STATES, TWO_ROWS), (BF16_STATES,), (EIGHT_BITS,), (OFFLOAD,))
_ADAPTED = ((FUSED, KEEP_ALL), (FUSED, SELECTIVE), (FUSED,))

SECTIONS = (
    Section((Item("device", "Is a product right, and what does the device reach?", 25, DeviceCheck()),)),
    Section(
        (
            _case("pp2, fp32", "Does 1F1B end on two ranks, and is it right?"),
            _case("pp4, fp32", "Does 1F1B end on four ranks?"),
            _case("pp2 dp2, fp32", "Does it while two replicas sum gradients?"),
            *(_case(case.name, TASKS[case.task].question) for case in ADDED_CASES if TASKS[case.task].question),
            _case("pp2, bf16", "Is bf16 right on two ranks?"),
            _case("pp4, bf16", "Is bf16 right on four ranks?"),
            _case("pp4 interleaved, fp32", "Do several chunks per rank end on four ranks?"),
            _case("pp4 zero_bubble, fp32", "Does zero bubble end on four ranks?"),
        ),
        cores=2,
    ),
    Section(
        (
            _group("one group, three tensors, 4 KB", "Does NCCL lock as its sources say?", "joined", 2**10, hangs=True),
            _group("one group, three tensors, 64 MB", "Does it at 64 MB too?", "joined", 2**24, hangs=True),
            _group("one group, one tensor, 64 MB", "Is it the second tensor that locks?", "single", 2**24),
            _group("a group per message, 64 MB", "Do groups that match end?", "mirrored", 2**24),
            _group("two communicators, 64 MB", "Would a communicator for gradients have helped?", "apart", 2**24),
            _group(
                "one group, modules loaded first", "Is it not CUDA, which loads what it runs first?", "joined", 2**18,
                hangs=True, CUDA_MODULE_LOADING="EAGER",
            ),
            _group("one group, aborted", "Does the device answer once a locked group is aborted?", "joined", 2**18,
                   kind="abort"),
            _replay("2 stages", "Do all schedules end, with what was sent?", 2),
            _replay("3 stages", "Do they with a rank in the middle?", 3),
            _replay("4 stages", "Do they with two ranks in the middle?", 4),
            _replay("3 stages, waits", "Do they where ranks wait for their device, and one is slow?", 3, True),
            _replay("3 stages, blocking", "Do they where each launch blocks?", 3, CUDA_LAUNCH_BLOCKING="1"),
            _replay("3 stages, one queue", "Do they with one hardware queue?", 3, CUDA_DEVICE_MAX_CONNECTIONS="1"),
            _replay("2 stages x 2", "Do they while replicas sum, as a run is started?", 2, True, 2),
            _replay("2 stages x 2, order 0", "Do they in any order of launches?", 2, True, 2, **{LAUNCH_ORDER: "0"}),
            _replay("2 stages x 2, order 1", "Do they in the host's order?", 2, True, 2, **{LAUNCH_ORDER: "1"}),
        ),
        cores=4,
    ),
    Section(
        (
            _case("pp1 experts, fp32", "Are experts right on one rank?"),
            _case("dp2, fp32", "Are replicas of a dense model right?"),
            _case("dp2 experts, fp32", "Are replicas right that each have all experts?"),
            _case("ep2 experts, fp32", "Are divided experts right, or did a token move?"),
            _case("ep2 experts again, fp32", "Is a second run the same?"),
            _case("pp2 experts, fp32", "Are stages with experts right?"),
        ),
        cores=2,
    ),
    Section(
        (
            _slice("", "How fast are eight layers of 8B, each recomputed?"),
            _slice(", fused", "What do fused kernels gain?", FUSED),
            _slice(", fused, nothing recomputed", "What do they gain without recomputation?", FUSED, KEEP_ALL),
            _slice(", fused, selective", "What do they gain with products kept?", FUSED, SELECTIVE),
            _slice(", nothing recomputed", "What does recomputation cost?", KEEP_ALL),
            _slice(", selective", "What does it cost with products kept?", SELECTIVE),
            _slice(", every second", "What does it cost in every second layer?", *EVERY_SECOND),
            _slice(", micro-batches of 2", "What do larger products gain?", TWO_ROWS),
            _slice(
                ", fused, nothing recomputed, micro-batches of 2", "What do these gain together?", FUSED, KEEP_ALL,
                TWO_ROWS,
            ),
            _slice(", bf16 averages", "What do averages in bf16 cost?", BF16_STATES),
            _slice(", 8-bit averages", "What do averages in 8 bits cost?", EIGHT_BITS),
            _slice(", offload", "What does the update on the host cost?", OFFLOAD, seconds=25),
            _slice(", FlashAttention-3", "What does it gain?", "flash_kernels=fa3"),
        )
    ),
    Section(
        (
            _slice(", compile", "What does compiling gain?", COMPILED, seconds=35),
            _slice(", compile, nothing recomputed", "What without recomputation?", COMPILED, KEEP_ALL, seconds=35),
            _slice(", compile, selective", "What with products kept?", COMPILED, SELECTIVE, seconds=35),
            _slice(
                ", compile, nothing recomputed, micro-batches of 2", "What with larger products?", COMPILED, KEEP_ALL,
                TWO_ROWS, seconds=35,
            ),
        )
    ),
    Section(
        (
            Item("8b full", "How fast is 8B, with what is fastest and fits?", 60, Variant("8b", choices=_FULL)),
            Item(
                "8b full, all recomputed", "How fast is it by the mark's recipe, compiled?", 110,
                Variant("8b", (COMPILED,), _AS_THE_MARK),
            ),
            Item("8b LoRA", "How fast is LoRA on all projections?", 45, Variant("8b", LORA, _ADAPTED)),
            Item("8b LoRA, qkv", "How fast is it on three?", 40, Variant("8b", (*LORA, QKV), _ADAPTED)),
            *(
                Item(
                    f"1b, micro-batches of {size}", "Does a small model wait for the host?", 12,
                    Variant("1b", (f"micro_batch_size={size}",)),
                )
                for size in (1, 2, 4)
            ),
            Item(
                "10 layers of 70B, LoRA, qkv", "How fast is an eighth of 70B?", 40,
                Variant("70b stage", (*LORA, QKV), _ADAPTED),
            ),
            Item(
                "10 layers of 70B, LoRA", "How fast is it on all projections?", 40, Variant("70b stage", LORA, _ADAPTED)
            ),
            _experts("", "How fast are four layers of Qwen3-30B-A3B, their routers compared each step?"),
            _experts(", no comparison", "What does the comparison of routers cost?", UNLOGGED),
            _experts(", routers in fp32", "What do routers in fp32 cost?", UNLOGGED, "moe.router_dtype=fp32"),
        )
    ),
    Section(
        (
            _slice(", trace", "What takes the time of an eager slice?", FUSED, KEEP_ALL, seconds=20, traced=True),
            Item("1b, trace", "Where does a small model wait?", 20, Variant("1b", traced=True)),
        )
    ),
    Section((*_list_layers("DeepSeek-V3", "deepseek layer"), *_list_layers("Qwen3-235B", "235b layer"))),
    Section((*_list_indexed(),)),
)  # fmt: skip
ITEMS = tuple(item for section in SECTIONS for item in section.items)
