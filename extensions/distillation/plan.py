"""The plan of a distillation's teacher: whether its pass over the data fits, how long that takes, what it leaves."""

from __future__ import annotations

from dataclasses import replace

from data.storage.scores import count_bytes
from extensions.distillation.keys import DistillConfig
from extensions.distillation.scores import list_teacher_columns
from formatting import render_bytes, render_count, render_seconds
from training.config.schema import RunConfig
from training.cost_terms.cost_term import Stage
from training.cost_terms.first_pass import count_working
from training.cost_terms.loss import LossBytes
from training.cost_terms.table import sum_memory
from training.costs.hardware import GIB, Machine
from training.planner.plan import list_resolved_stages, plan_resolved
from training.resolution.resolve import ResolvedRun


def describe_teacher(
    teacher: ResolvedRun, machine: Machine, config: RunConfig, num_samples: int | None
) -> tuple[str, float | None]:
    """Return the lines of the report on a teacher, and the seconds of its pass over the data, which ends before the
    student is built; None where there is none, or where the data are not known.

    teacher: at its layout. config: the student's. num_samples: rows of the data, which are taken to be full and
    every token a target; None where not known.
    """
    options = config.read_group(DistillConfig)
    layout, stages = teacher.layout, list_resolved_stages(teacher, machine)
    parameters = render_count(sum(stage.num_parameters for stage in stages) * layout.tensor_parallel_size)
    if options.online:
        weights = max(stage.run.weight_bytes * stage.num_parameters for stage in stages)
        return (
            f"teacher: {parameters} parameters next to the student, before each step; its weights take "
            f"{weights / GIB:.1f} GiB of a GPU"
        ), None
    assert (top_k := options.top_k) is not None
    peak, target = max(_count_peak(stage, top_k) for stage in stages), count_bytes(list_teacher_columns(top_k))
    fits = peak <= machine.usable_bytes
    lines = (
        f"teacher: {parameters} parameters, once over the data before the student is built; {layout.describe()}\n"
        f"teacher {'FITS' if fits else 'DOES NOT FIT'}: {peak / GIB:.1f} of {machine.usable_bytes / GIB:.1f} GiB on "
        f"the fullest GPU{'' if fits else '; give distill.num_stages or distill.tensor_parallel_size more ranks'}\n"
        "teacher's pass: "
    )
    kept = f"{target} bytes on disk a target"
    if num_samples is None:
        return f"{lines}{kept}; the data are not known, give max_steps or a train_file of JSON lines", None
    tokens = num_samples * stages[0].run.tokens_per_sample
    passing = replace(teacher, config=replace(teacher.config, evaluate_only=True))  # no gradient of its head
    seconds = plan_resolved(passing, machine).time_forward(num_samples)
    return (
        f"{lines}at most {render_seconds(seconds)}, {render_count(tokens)} tokens; {kept}, at most "
        f"{render_bytes(tokens * target)}"
    ), seconds


def _count_peak(stage: Stage, top_k: int) -> int:
    """Bytes on a GPU: weights; what a pass takes; on the last stage the logits of a chunk, at two temperatures and as
    probabilities, and what is found."""
    run, used = stage.run, sum_memory(stage).weights + count_working(stage)
    if not stage.has_loss:
        return used
    shard, on_gpu = -(-run.vocab_size // run.layout.tensor_parallel_size), run.hardware.device.value == "cuda"
    logits = LossBytes(run.tokens, shard, 1, run.config.precision, on_gpu).peak
    return used + 2 * logits + 2 * run.tokens * count_bytes(list_teacher_columns(top_k))
