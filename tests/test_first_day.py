"""A stranger's first day, through the real commands: a base model and a file of questions and answers become a chat
model by LoRA, the run ends early and exports its best checkpoint, is started again after its end, and continues
with one rank fewer."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from support.cases import BOUND
from support.launching import ROOT, Ended, Launch, run, run_deepspeed
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import free_port
from torch.nn import functional as F

# At this learning rate the loss of other questions has a turning point
KEYS = (
    *("-cn", "llama_tiny_pp2", "precision=fp32", "num_stages=2", "micro_batch_size=2", "global_batch_size=8"),
    *("data=chat", "data.chat_template=chatml", "data.prompt_field=question", "data.completion_field=answer"),
    *("max_seq_length=384", "adapter=lora", "adapter.modules_to_save=[embed_tokens,lm_head]", "learning_rate=1e-2"),
    *("lr_scheduler_type=constant", "max_steps=60", "eval_steps=2", "early_stopping_patience=2", "logging_steps=1"),
    *("load_best_model_at_end=true", "keep_last=1", "stuck_minutes=0.5", "resume=auto"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("day")
    save_llama(root / "base", max_position_embeddings=384)
    save_tokenizer(root / "base")
    for name, count, seed in (("train", 40, 0), ("eval", 12, 1)):
        rows = [json.loads(line) for line in save_records(root / "records", count, seed).read_text().splitlines()]
        lines = [json.dumps({"question": row["prompt"], "answer": row["completion"]}) + "\n" for row in rows]
        (root / f"{name}.jsonl").write_text("".join(lines))
    return root


def list_arguments(root: Path, out: Path) -> list[str]:
    files = (f"train_file={root}/train.jsonl", f"eval_file={root}/eval.jsonl", f"data.cache_dir={root}/cache")
    return [*KEYS, *files, f"model_name_or_path={root}/base", f"output_dir={out}"]


@pytest.mark.full
def test_from_a_base_model_to_a_chat(root: Path) -> None:
    out = root / "chat"
    ended = run_deepspeed(list_arguments(root, out), root)
    assert ended.code == 0, ended.output
    completed = json.loads((out / "completed.json").read_text())
    best, last = completed["best_step"], completed["step"]
    assert (completed["ended_by"], last) == ("early stopping", best + 4), "else the case shows nothing"
    assert f"evaluate_only=true resume={out}/checkpoints/global_step{best} " in ended.output

    assert compute_exported_loss(root, out / "hf") == pytest.approx(completed["best_metric"], rel=BOUND)
    asked = [*list_arguments(root, out)[:-1], f"output_dir={root}/asked", "evaluate_only=true"]
    asked = [word for word in asked if word != "resume=auto"] + [f"resume={out}/checkpoints/global_step{best}"]
    assert run_deepspeed(asked, root).code == 0
    (evaluation,) = (root / "asked").glob("evaluation.json")
    assert json.loads(evaluation.read_text())["eval_loss"] == pytest.approx(completed["best_metric"], rel=BOUND)

    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--model_name_or_path", str(out / "hf")]
    said = run([*command, "--prompt", "What is it?", "--max_new_tokens", "8"], root)
    assert said.code == 0 and "> What is it?" in said.output, said.output

    before = read_files(out)
    again = run_deepspeed(list_arguments(root, out), root)
    assert again.code == 0, again.output
    assert f"{out} has finished: step {last} of 60, exported; nothing is left to do." in again.output
    assert "raise early_stopping_patience" in again.output and read_files(out) == before


def compute_exported_loss(root: Path, folder: Path) -> float:
    """The mean loss of the answers and their end tokens, by peft's and the tokenizer's own reading of the export."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) > 320, "chatml's tokens are new to it"
    total, count = 0.0, 0
    for row in (json.loads(line) for line in (root / "eval.jsonl").read_text().splitlines()):
        question, answer = ({"role": "user", "content": row["question"]}, row["answer"])
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, answer + "<|im_end|>")]
        with torch.no_grad():
            logits = model(torch.tensor([ids[0] + ids[1]])).logits[0, len(ids[0]) - 1 : -1]
        total += F.cross_entropy(logits, torch.tensor(ids[1]), reduction="sum").item()
        count += len(ids[1])
    return total / count


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns what a run with nothing left to do must not change: everything but its logs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] != "logs"]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.full
def test_with_one_rank_fewer(root: Path) -> None:
    """The losses are those of a run without a loss of ranks. SGD: Adam amplifies the rounding of another layout."""
    whole, out, hosts = root / "whole", root / "out", root / "hosts"
    keys = ("optimizer=sgd", "max_steps=12", "save_steps=2", "load_best_model_at_end=false")
    keys += ("early_stopping_patience=null",)
    assert run_deepspeed([*list_arguments(root, whole), *keys], root).code == 0
    hosts.write_text("localhost slots=2\n")

    def lose_a_rank(launch: Launch) -> None:
        while not (out / "checkpoints" / "latest").is_file():
            assert launch.process.poll() is None, launch.log.read_text()
            time.sleep(0.02)
        hosts.write_text("localhost slots=1\n")
        os.kill(launch.rank(1), signal.SIGKILL)

    ended = supervise([*list_arguments(root, out), *keys], hosts, out, lose_a_rank)
    assert ended.code == 0, ended.output
    (said,) = (line for line in ended.output.splitlines() if "slots left: 1 of 2 (localhost); used: 1, with " in line)
    assert "num_stages=1" in said.split()
    assert read_losses(out) == pytest.approx(read_losses(whole), rel=BOUND)


def supervise(arguments: list[str], hosts: Path, out: Path, while_running: object) -> Ended:
    script = [sys.executable, str(ROOT / "scripts" / "supervise.py"), "--output_dir", str(out), "--elastic"]
    launcher = ["deepspeed", "--num_gpus", "{num_ranks}", "--master_port", str(free_port())]
    command = [*launcher, str(ROOT / "trainer_base_ds_mp.py"), *arguments]
    return run([*script, "--hosts_command", f"cat {hosts}", "--", *command], out.parent, while_running)


def read_losses(out: Path) -> list[float]:
    """Returns the losses of steps and of evaluations."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    evaluations = {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}
    assert list(losses) == list(range(1, 13))
    return [*losses.values(), *evaluations.values()]
