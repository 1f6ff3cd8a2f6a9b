"""The plan of a distillation: the teacher's pass before training, and a teacher in memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.configs import build_config

from errors import UserError
from training.costs.hardware import complete_hardware
from training.plan_command.run import build_plan, place_auxiliary, plan_run, resolve_auxiliary, resolve_planned


def test_the_pass_of_a_teacher_is_planned_at_its_own_layout(tmp_path: Path) -> None:
    """Its memory against this machine, its time and the disk that it takes, from the lines of the data."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 100)
    given = (
        "model=llama_tiny", "+model@distill.model=llama_tiny", "distill.teacher=a_teacher", "distill.top_k=16",
        "plan=true", "world_size=2", "num_stages=2", "distill.num_stages=1", "micro_batch_size=2",
        "global_batch_size=8", "max_seq_length=128", f"train_file={tmp_path}/train.jsonl", f"output_dir={tmp_path}",
    )  # fmt: skip
    report = "\n".join(plan_run(build_config(*given)))
    assert re.search(r"teacher: 3\.\d\dM parameters, once over the data before the student is built; .*dp", report)
    assert "teacher FITS: 0." in report and "\nFITS: " in report
    assert "12.80K tokens; 132 bytes on disk a target, at most 1.6 MiB" in report
    tight = "\n".join(plan_run(build_config(*given, "hardware.memory=0.001")))
    assert "teacher DOES NOT FIT: " in tight and "give distill.num_stages or distill.tensor_parallel_size" in tight
    for overrides, message in (
        (("distill.num_stages=9",), "distill.teacher=a_teacher: num_stages=9"),
        (("distill.top_k=9999",), "distill.top_k=9999: the vocabulary has 2048 tokens"),
    ):
        with pytest.raises(UserError, match=message):
            list(plan_run(build_config(*given, *overrides)))
    unknown = [key for key in given if "distill.model" not in key]
    with pytest.raises(UserError) as caught:
        list(plan_run(build_config(*unknown)))
    assert str(caught.value) == (
        "distill.teacher=a_teacher: it is not there, and distill.model states no architecture to plan; choose one of "
        "conf/model, such as +model@distill.model=llama_70b"
    )


def test_a_teacher_in_memory_is_planned_with_its_student(tmp_path: Path) -> None:
    """By hand: its weights in bf16, and on the stage of the loss the hidden states of a step's micro-batches."""
    given = (
        "model=llama_tiny", "plan=true", "world_size=2", "num_stages=2", "micro_batch_size=2", "global_batch_size=8",
        "max_seq_length=128", f"output_dir={tmp_path}",
    )  # fmt: skip
    taught = ("+model@distill.model=llama_8b", "distill.teacher=a_teacher", "distill.online=true")
    report = "\n".join(plan_run(build_config(*given, *taught, "distill.model.vocab_size=2048")))
    assert re.search(r"teacher: .*B parameters next to the student, before each step; .* take 6\.\d GiB", report)
    assert "in the teacher's pass, " in report and "FITS: " in report
    config = build_config(*given, *taught, "distill.model.vocab_size=2048")
    alone, model = build_config(*given), resolve_planned(config)
    machine, teacher = complete_hardware(config.hardware, config.precision, 2), resolve_auxiliary(config, model)
    assert teacher is not None
    plain, plan = build_plan(alone, resolve_planned(alone), machine), build_plan(config, model, machine, teacher)
    weights = sum(each.memory.weights - own.memory.weights for each, own in zip(plan.stages, plain.stages, strict=True))
    assert weights == 2 * sum(cost.parameters.held for cost in place_auxiliary(config, teacher, plan.layout).costs)
    states = plan.stages[1].memory.activations - plain.stages[1].memory.activations
    assert states == 4 * 2 * 128 * 4096 * 2  # micro-batches x rows x tokens x hidden size x bytes
    assert plan.stages[0].memory.activations == plain.stages[0].memory.activations
    assert [each.memory.optimizer for each in plan.stages] == [each.memory.optimizer for each in plain.stages]
    assert plan.step_seconds > 2 * plain.step_seconds
    with pytest.raises(UserError, match="distill.online=true does not go together with plan=search"):
        list(plan_run(build_config(*given, *taught, "plan=search")))
    with pytest.raises(UserError, match="embedding has 2048 rows, the teacher's 128256, so there is no whole"):
        list(plan_run(build_config(*given, *taught, "distill.top_k=null")))
