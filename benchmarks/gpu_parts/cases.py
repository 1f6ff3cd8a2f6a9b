"""The table of *right*: every way to train, and what each run is compared with.

What a GPU has never been seen to do comes first: a part that runs out of time has then run it. bf16 where fp32 takes
other kernels. tests/test_gpu_rows.py holds the table against the keys of a run, so that none is left without a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.gpu_parts.tasks import Task, build_next_token
from extension import load_extensions, load_part

STEPS = 3
EPSILON = 0.01  # of Adam, which with a small one turns the rounding of small gradients into whole steps
# Of each optimizer the same size of steps: Adam divides by its epsilon where that is larger than the gradient
LEARNING_RATES = {"sgd": 0.3, "adamw": 0.3 * EPSILON, "adamw_8bit": 0.3 * EPSILON}


def _list_added() -> Iterator[Task]:
    """Yields the tasks of extensions, which are in a file `gpu_rows.py` of theirs."""
    for extension in load_extensions():
        if (extension.folder / "gpu_rows.py").is_file():
            yield from load_part(f"{extension.package}.gpu_rows:TASKS")


ADDED_TASKS = tuple(_list_added())
TASKS = {task.name: task for task in (Task("sft", "sft", build_next_token), *ADDED_TASKS)}


@dataclass(frozen=True)
class Case:
    """A run and what it is compared with.

    model: the name of one that `material.save_model` makes. task: whose data it takes. needs: "gpu", "hopper"
    (compute capability 9.0), "compiler" (of what triton makes, on a GPU), or a package without which it cannot run.
    """

    name: str
    overrides: tuple[str, ...] = ()
    world_size: int = 1
    precision: str = "fp32"
    model: str = "llama"
    task: str = "sft"
    optimizer: str = "sgd"
    adapter: bool = False
    in_4bit: bool = False
    packed: bool = False
    needs: tuple[str, ...] = ()

    @property
    def learning_rate(self) -> float:
        return TASKS[self.task].learning_rate or LEARNING_RATES[self.optimizer]

    @property
    def data(self) -> str:
        return TASKS[self.task].data

    @property
    def has_routers_to_compare(self) -> bool:
        """Returns whether what its routers choose can be compared: each rank sees the tokens of its samples."""
        return self.model == "mixtral" and not any(key.startswith("num_stages") for key in self.overrides)

    def list_keys(self) -> Iterator[str]:
        """Yields what the case says of a run, as overrides; its model and batch are whose the material is."""
        yield from (f"task={self.task}", f"data={self.data}", f"data.packing={str(self.packed).lower()}")
        yield from (f"precision={self.precision}", f"optimizer={self.optimizer}", f"learning_rate={self.learning_rate}")
        if self.optimizer != "sgd":
            yield f"optimizer.eps={EPSILON}"
        if self.adapter:
            yield "adapter=lora"
        if self.in_4bit:
            yield "adapter.load_in_4bit=true"
        yield from self.overrides


# What all runs are given
SHARED = (
    "data.prompt_template='{prompt}'", "micro_batch_size=2", "lr_scheduler_type=constant", "warmup_ratio=0",
    "max_grad_norm=0", "activation_checkpoint_interval=0", "logging_steps=1", f"max_steps={STEPS}",
)  # fmt: skip
PP2, CP2, TP2 = ("num_stages=2",), ("context_parallel_size=2",), ("tensor_parallel_size=2",)
FA3 = "flash_kernels=fa3"
RECOMPUTED = "activation_checkpoint_interval=2"
ADDED_CASES = tuple(
    Case(f"pp2 {task.name}, bf16", PP2, 2, "bf16", model=task.model, task=task.name) for task in ADDED_TASKS
)
CASES = (
    Case("pp2, fp32", PP2, 2),
    Case("pp2, bf16", PP2, 2, "bf16"),
    Case("pp4, bf16", ("num_stages=4",), 4, "bf16"),
    Case("pp2 dp2, bf16", PP2, 4, "bf16"),
    Case("pp2 tp2, bf16", (*PP2, *TP2), 4, "bf16"),
    Case("pp2 ep2 experts, bf16", (*PP2, "expert_parallel_size=2"), 4, "bf16", model="mixtral"),
    Case("pp4, fp32", ("num_stages=4",), 4),
    Case("pp2 dp2, fp32", PP2, 4),
    Case("pp4 interleaved, fp32", ("num_stages=4", "schedule=interleaved"), 4),
    Case("pp4 zero_bubble, fp32", ("num_stages=4", "schedule=zero_bubble"), 4),
    Case("pp1 experts, fp32", model="mixtral"),
    Case("dp2 experts, fp32", world_size=2, model="mixtral"),
    Case("ep2 experts again, fp32", ("expert_parallel_size=2",), 2, model="mixtral"),
    Case("pp2 experts, fp32", PP2, 2, model="mixtral"),
    Case("ep2 experts, fp32", ("expert_parallel_size=2",), 2, model="mixtral"),
    Case("pp2 experts, bf16", PP2, 2, "bf16", model="mixtral"),
    Case(
        "pp2 LoRA on experts in 4 bits, fp32", PP2, 2, model="mixtral", adapter=True, in_4bit=True,
        needs=("bitsandbytes",),
    ),
    Case("pp2 activation_offload, bf16", (*PP2, RECOMPUTED, "activation_offload=true"), 2, "bf16"),
    Case(
        "cp2 ring, packed, flash kernels, bf16", (*CP2, "context_parallel_mode=ring", FA3), 2, "bf16", packed=True,
        needs=("hopper", "flash_attn_interface"),
    ),
    Case(
        "flash kernels, packed, bf16", (FA3,), precision="bf16", packed=True, needs=("hopper", "flash_attn_interface"),
    ),
    *ADDED_CASES,
    Case("pp1, fp32"),
    Case("pp1, bf16", precision="bf16"),
    Case("dp2, fp32", world_size=2),
    Case("dp2 adamw, fp32", world_size=2, optimizer="adamw"),
    Case("packed, sdpa, fp32", ("attn_implementation=sdpa",), packed=True),
    Case("packed, auto, bf16", ("attn_implementation=auto",), precision="bf16", packed=True),
    Case(
        "packed, flash_attention_2, bf16", ("attn_implementation=flash_attention_2",), precision="bf16", packed=True,
        needs=("gpu", "flash_attn"),
    ),
    Case("recompute grouped, fp32", (RECOMPUTED,)),
    Case("recompute every, fp32", (RECOMPUTED, "activation_checkpoint_mode=every")),
    Case("recompute selective, fp32", ("activation_checkpoint_interval=1", "activation_checkpoint_mode=selective")),
    # Right on an H200 (benchmarks/results)
    Case("pp2 zero_bubble, bf16", (*PP2, "schedule=zero_bubble"), 2, "bf16"),
    Case("cp2 ulysses, bf16", (*CP2, "context_parallel_mode=ulysses"), 2, "bf16"),
    Case("cp2 ring, bf16", (*CP2, "context_parallel_mode=ring"), 2, "bf16"),
    Case("cp2 ring, packed, bf16", (*CP2, "context_parallel_mode=ring"), 2, "bf16", packed=True),
    Case("tp2 sequence_parallel, bf16", (*TP2, "sequence_parallel=true"), 2, "bf16"),
    Case("dp2 zero2, bf16", ("zero_stage=2",), 2, "bf16"),
    Case("dp2 zero3, bf16", ("zero_stage=3",), 2, "bf16"),
    Case("dp2 zero3, weights on the host, bf16", ("zero_stage=3", "offload_parameters=cpu"), 2, "bf16"),
    Case("dp2 in shard groups, bf16", ("sharding_parallel_size=1",), 2, "bf16"),
    Case("ep2 experts, bf16", ("expert_parallel_size=2",), 2, "bf16", model="mixtral"),
    Case("fused kernels, bf16", ("fused_kernels=auto",), precision="bf16", needs=("gpu", "compiler", "liger_kernel")),
    Case("dp2 bf16 states, bf16", ("optimizer.state_dtype=bf16",), 2, "bf16", optimizer="adamw"),
    Case("dp2 8-bit states, bf16", (), 2, "bf16", optimizer="adamw_8bit", needs=("bitsandbytes",)),
    Case("pp1, fp16", precision="fp16", needs=("gpu",)),
    Case("pp2 interleaved, fp32", (*PP2, "schedule=interleaved"), 2),
    Case("tp2, fp32", TP2, 2),
    Case(
        "packed, flex_attention, bf16", ("attn_implementation=flex_attention",), precision="bf16", packed=True,
        needs=("gpu", "compiler"),
    ),
    Case("LoRA, fp32", adapter=True),
    Case("LoRA on 4 bits, fp32", adapter=True, in_4bit=True, needs=("bitsandbytes",)),
    Case("compile, fp32", ("compile=true",), needs=("compiler",)),
    Case("offload, fp32", ("offload_optimizer=cpu",)),
)  # fmt: skip
