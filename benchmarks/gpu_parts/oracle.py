"""The oracle of every row of *right*: a plain Hugging Face model in one process, by SGD.

    python -m benchmarks.gpu_parts.oracle JOB.json

Each step takes every document of the data set, one after the other and each alone, so there is no padding, no packing
and no order to agree on. Weights and passes are in the dtype of the run; gradients are summed, and weights kept, in
fp32, as a run's optimizer does it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Job:
    """data: a tokenized folder. adapter: a peft folder, or empty. in_4bit: projections hold what nf4 makes of them.
    skipped: steps, from 1, whose update the run has left out (fp16, while it looks for its loss scale)."""

    model: str
    data: str
    output: str
    device: str
    dtype: str
    steps: int
    learning_rate: float
    adapter: str = ""
    in_4bit: bool = False
    skipped: tuple[int, ...] = ()

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))


def main() -> None:
    from safetensors.torch import save_file

    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    model, figures = build_model(job), []
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: parameter.detach().float().clone() for name, parameter in trained.items()}
    documents = _load_documents(job)
    for step in range(1, job.steps + 1):
        loss, gradients = compute_gradients(model, trained, documents)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
        figures.append({"loss": loss, "grad_norm": norm.item()})
        for name, parameter in trained.items():
            if step not in job.skipped:
                masters[name] -= job.learning_rate * gradients[name]
            parameter.data.copy_(masters[name])
    output = Path(job.output)
    output.mkdir(parents=True, exist_ok=True)
    save_file({name: master.cpu().contiguous() for name, master in masters.items()}, output / "weights.safetensors")
    (output / "figures.json").write_text(json.dumps(figures))


def build_model(job: Job) -> nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, job.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
    )
    if job.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, job.adapter, is_trainable=True)
    model = model.to(job.device).train()
    if job.in_4bit:
        _round_projections(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def _round_projections(model: nn.Module) -> None:
    from bitsandbytes import functional

    for name, parameter in model.named_parameters():
        if "base_layer" in name:
            packed, state = functional.quantize_4bit(parameter.data, quant_type="nf4", compress_statistics=True)
            parameter.data = functional.dequantize_4bit(packed, state)


def _load_documents(job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from benchmarks.gpu_parts.material import read_documents

    return [
        (torch.tensor([ids], device=job.device), torch.tensor(labels[1:], device=job.device))
        for ids, labels in read_documents(Path(job.data))
    ]


def compute_gradients(
    model: nn.Module, trained: dict[str, nn.Parameter], documents: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss per target token of all documents, and its gradient in fp32."""
    num_targets = sum(int((targets >= 0).sum()) for _, targets in documents)
    total = 0.0
    gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in trained.items()}
    for input_ids, targets in documents:
        logits = model(input_ids=input_ids, use_cache=False).logits[0, :-1].float()
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100) / num_targets
        loss.backward()
        total += loss.item()
        for name, parameter in trained.items():
            gradients[name] += parameter.grad.float()
            parameter.grad = None
    return total, gradients


if __name__ == "__main__":
    main()
