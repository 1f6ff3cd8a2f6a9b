"""The `Trainer` of transformers as a runner of `benchmarks/pipeline.py`: with its own model and loss, on all cores, in
a process of its own that takes a step when it is asked to."""

from __future__ import annotations

import itertools
import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.allocation import keep_freed_memory
from benchmarks.peers import Step
from benchmarks.workload import build_llama, repeat_batch


def build_trainer(connection: Connection | None) -> Step:
    """The `Trainer` of transformers, which waits in a process of its own with all cores; None on a rank that has
    nothing to do meanwhile."""

    def step() -> None:
        if connection is not None:
            connection.send("step")
            connection.recv()

    return step


def serve_trainer(
    connection: Connection,
    model: dict[str, int],
    micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    precision: str,
    fresh_memory: bool,
) -> None:
    """Takes an optimizer step whenever it is asked to; ends with the process at the other end."""
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if not fresh_memory:
        keep_freed_memory()

    class Turns(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            connection.recv()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            connection.send("done")

    input_ids = next(repeat_batch(micro_batch_size, seq_length, model["vocab_size"])).inputs.input_ids
    rows = list(itertools.islice(itertools.cycle(input_ids), micro_batches * micro_batch_size))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=micro_batches,
        max_steps=10**6,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        bf16=precision == "bf16",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    try:
        Trainer(LlamaForCausalLM(build_llama(**model)), arguments, train_dataset=dataset, callbacks=[Turns()]).train()
    except EOFError:
        pass
