"""The oracle of every row of *right*: a plain Hugging Face model in one process, by torch's own optimizers.

    python -m benchmarks.gpu_parts.oracle JOB.json

Each step takes every sample of the data set, one after the other and each alone. Weights and passes are in the dtype of
the run; gradients are summed, and weights kept, in fp32, as a run's optimizer does it. 8-bit and bf16 states are
compared with states in fp32. What routers choose for each token is kept (`routers.py`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_parts.cases import TASKS
from benchmarks.gpu_parts.routers import RouterChoices
from benchmarks.gpu_parts.tasks import Sample, Terms


@dataclass(frozen=True)
class Job:
    """data: a tokenized folder. optimizer: sgd, or adamw with the betas of conf/optimizer. adapter: a peft folder, or
    empty. in_4bit: frozen weights hold what nf4 makes of them. skipped: steps, from 1, whose update the run has left
    out (fp16, while it looks for its loss scale)."""

    model: str
    data: str
    output: str
    device: str
    dtype: str
    steps: int
    learning_rate: float
    task: str = "sft"
    optimizer: str = "sgd"
    epsilon: float = 1e-8
    adapter: str = ""
    in_4bit: bool = False
    skipped: tuple[int, ...] = ()

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    model, figures = build_model(job), []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in trained]
    optimizer, terms = _build_optimizer(job, masters), TASKS[job.task].build_terms(model, _load_samples(job))
    choices = RouterChoices()
    choices.watch(model)
    model.register_forward_pre_hook(lambda _, __, named: choices.start(named["input_ids"]), with_kwargs=True)
    for step in range(1, job.steps + 1):
        loss, gradients = compute_gradients(trained, terms)
        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
        figures.append({"loss": loss, "grad_norm": norm.item()})
        for master, gradient in zip(masters, gradients):
            master.grad = gradient
        if step not in job.skipped:
            optimizer.step()
        for parameter, master in zip(trained, masters):
            parameter.data.copy_(master.data)
    for parameter, master in zip(trained, masters):
        parameter.data = master.data
    model.save_pretrained(job.output)
    (Path(job.output) / "figures.json").write_text(json.dumps(figures))
    choices.save(Path(job.output) / "routers.pt")


def build_model(job: Job) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    dtype = getattr(torch, job.dtype)
    auto: Any = AutoModelForSequenceClassification if TASKS[job.task].model == "classifier" else AutoModelForCausalLM
    model = auto.from_pretrained(job.model, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
    if job.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, job.adapter, is_trainable=True)
    model = model.to(job.device).train()
    if job.in_4bit:
        _round_frozen(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def _round_frozen(model: nn.Module) -> None:
    from bitsandbytes import functional

    for name, parameter in model.named_parameters():
        if "base_layer" in name and "lora_" not in name:
            whole = parameter.data
            for matrix in whole if whole.ndim == 3 else [whole]:
                column = matrix.view(-1, 1)  # as `models/layers/nf4.py` has it
                packed, state = functional.quantize_4bit(column, quant_type="nf4", compress_statistics=True)
                column.copy_(functional.dequantize_4bit(packed, state))


def _build_optimizer(job: Job, masters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if job.optimizer == "sgd":
        return torch.optim.SGD(masters, lr=job.learning_rate)
    return torch.optim.AdamW(masters, lr=job.learning_rate, betas=(0.9, 0.95), eps=job.epsilon, weight_decay=0)


def _load_samples(job: Job) -> list[Sample]:
    from benchmarks.gpu_parts.material import read_samples

    return [
        Sample(torch.tensor([ids], device=job.device), torch.tensor(labels[1:], device=job.device), label)
        for ids, labels, label in read_samples(Path(job.data))
    ]


def compute_gradients(trained: list[nn.Parameter], terms: Terms) -> tuple[float, list[torch.Tensor]]:
    """The loss of a step, and its gradient in fp32."""
    total, gradients = 0.0, [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
    for term in terms():
        term.backward()
        total += term.item()
        for parameter, gradient in zip(trained, gradients):
            if parameter.grad is not None:  # an expert that no token of a sample is sent to
                gradient += parameter.grad.float()
                parameter.grad = None
    return total, gradients


if __name__ == "__main__":
    main()
