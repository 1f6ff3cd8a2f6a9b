"""The plan of a distillation's teacher: whether its pass over the data fits, how long that takes, what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.loading.columns import list_teacher_columns
from data.storage.scores import count_bytes
from training.cost_terms.cost_term import Stage
from training.cost_terms.first_pass import count_working
from training.cost_terms.loss import LossBytes
from training.cost_terms.table import sum_memory
from training.costs.hardware import GIB, Machine
from training.planner.formatting import render_bytes, render_count, render_seconds
from training.planner.plan import list_resolved_stages, plan_resolved
from training.resolution.resolve import ResolvedRun


@dataclass(frozen=True)
class TeacherPlan:
    """The teacher's pass, which ends before the student is built.

    peaks: bytes on a GPU of each stage. bytes_of_target: on disk. num_tokens: of all rows, which are taken to be full
    and every token a target; None where the number of records is not known, as is seconds then.
    """

    layout: str
    num_parameters: int
    peaks: Sequence[int]
    memory_limit: float
    bytes_of_target: int
    num_tokens: int | None
    seconds: float | None

    @property
    def fits(self) -> bool:
        return max(self.peaks) <= self.memory_limit


def plan_teacher(teacher: ResolvedRun, top_k: int, machine: Machine, num_samples: int | None) -> TeacherPlan:
    """Return the plan of a teacher's pass. teacher: resolved from `derive_teacher`. num_samples: rows of the data."""
    layout, stages = teacher.layout, list_resolved_stages(teacher, machine)
    return TeacherPlan(
        layout=layout.describe(),
        num_parameters=sum(stage.num_parameters for stage in stages) * layout.tensor_parallel_size,
        peaks=[_count_peak(stage, top_k) for stage in stages],
        memory_limit=machine.usable_bytes,
        bytes_of_target=count_bytes(list_teacher_columns(top_k)),
        num_tokens=None if num_samples is None else num_samples * stages[0].run.tokens_per_sample,
        seconds=None if num_samples is None else plan_resolved(teacher, machine).time_forward(num_samples),
    )


def _count_peak(stage: Stage, top_k: int) -> int:
    """Weights; what a pass takes; on the last stage the logits of a chunk, at two temperatures and as probabilities,
    and what is found."""
    run, working = stage.run, count_working(stage)
    if not stage.has_loss:
        return sum_memory(stage).weights + working
    shard, on_gpu = -(-run.vocab_size // run.layout.tensor_parallel_size), run.hardware.device.value == "cuda"
    logits = LossBytes(run.tokens, shard, 1, run.config.precision, on_gpu).peak
    return sum_memory(stage).weights + working + 2 * logits + 2 * run.tokens * count_bytes(list_teacher_columns(top_k))


def render_online(teacher: ResolvedRun, machine: Machine) -> str:
    """Return the line of the report on a teacher that is in memory next to its student."""
    stages = list_resolved_stages(teacher, machine)
    weights = [stage.run.weight_bytes * stage.num_parameters for stage in stages]
    number = sum(stage.num_parameters for stage in stages) * teacher.layout.tensor_parallel_size
    return (
        f"teacher: {render_count(number)} parameters next to the student, before each step; its weights take "
        f"{max(weights) / GIB:.1f} GiB of a GPU"
    )


def render_teacher(plan: TeacherPlan) -> list[str]:
    """Return the lines of the report on a teacher's pass."""
    used = f"{max(plan.peaks) / GIB:.1f} of {plan.memory_limit / GIB:.1f} GiB on the fullest GPU"
    lines = [
        f"teacher: {render_count(plan.num_parameters)} parameters, once over the data before the student is built; "
        f"{plan.layout}",
        f"teacher {'FITS' if plan.fits else 'DOES NOT FIT'}: {used}"
        + ("" if plan.fits else "; give distill.num_stages or distill.tensor_parallel_size more ranks"),
    ]
    kept = f"{plan.bytes_of_target} bytes on disk a target"
    if plan.num_tokens is None or plan.seconds is None:
        return [*lines, f"teacher's pass: {kept}; the data are not known, give max_steps or a train_file of JSON lines"]
    most = render_bytes(plan.num_tokens * plan.bytes_of_target)
    return [
        *lines,
        f"teacher's pass: at most {render_seconds(plan.seconds)}, {render_count(plan.num_tokens)} tokens; {kept}, at "
        f"most {most}",
    ]
