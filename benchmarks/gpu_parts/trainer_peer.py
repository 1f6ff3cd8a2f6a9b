"""The `Trainer` of transformers on the same work, in a process alone with one GPU.

python -m benchmarks.gpu_parts.trainer_peer JOB.json
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.measured_runs import STEPS, WARM_UP, Speed


@dataclass(frozen=True)
class Job:
    """fields: of the model's config. weights: fp32, under autocast, or bf16. result: the file that gets a `Speed`."""

    fields: dict[str, Any]
    seq_length: int
    global_batch_size: int
    lora: bool
    weights: str
    device: str
    result: str

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(job.result).write_text(json.dumps(asdict(measure(job))))


def measure(job: Job) -> Speed:
    import torch
    from transformers import Trainer

    from benchmarks.workload import repeat_batch
    from training.observability.stage_timer import MemoryPeak

    device = torch.device(job.device)
    memory, model = MemoryPeak(device), build_model(job, device)
    input_ids = next(repeat_batch(1, job.seq_length, job.fields["vocab_size"])).inputs.input_ids
    samples = [{"input_ids": input_ids[0], "labels": input_ids[0]}] * (job.global_batch_size * (WARM_UP + STEPS))
    ends: list[float] = []
    memory.start()
    Trainer(model, build_arguments(job), train_dataset=samples, callbacks=[build_clock(device, ends)]).train()
    seconds = statistics.median([stop - start for start, stop in itertools.pairwise(ends)][WARM_UP - 1 :])
    return Speed(job.global_batch_size * job.seq_length / seconds, None, memory.read())


def build_model(job: Job, device: Any) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    from benchmarks.workload import build_llama

    config = build_llama(**job.fields)
    config.use_cache = False
    torch.set_default_dtype(torch.bfloat16 if job.weights == "bf16" else torch.float32)
    with device:
        model: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if job.lora:
        from peft import LoraConfig, get_peft_model

        options = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, options)
        model.enable_input_require_grads()
    return model


def build_arguments(job: Job) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=1,
        gradient_accumulation_steps=job.global_batch_size, max_steps=WARM_UP + STEPS,
        optim="adamw_torch_fused", max_grad_norm=1.0, bf16=job.device != "cpu", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, use_cpu=job.device == "cpu",
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip


def build_clock(device: Any, ends: list[float]) -> Any:
    """A callback that notes when each step has ended on the device."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ends.append(time.perf_counter())

    return Clock()


if __name__ == "__main__":
    main()
