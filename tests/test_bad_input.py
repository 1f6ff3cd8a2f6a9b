"""Bad input as a user meets it: one line that names the key or the file and the way out, and no rank left running.

Most of it in this process, through the same functions in the same order as a run; a few through the real launcher,
where it matters which rank finds the mistake.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.configs import CONF
from support.launching import Ended, run_alone, run_deepspeed, run_torchrun
from support.tiny import save_llama, save_records, save_tokenizer

from data.encoders.kinds import KINDS
from errors import UserError
from models.conversion.convert import convert_to_pipeline
from models.weights.sources import open_weights
from training.checkpoint.run_folder import RunFolder
from training.cli.command_line import check_command_line, clean_arguments, list_given
from training.config.schema import register_schema, to_typed
from training.distributed.ranks import Ranks
from training.inputs.datasets import load_tokenizer, tokenize
from training.inputs.step_budget import compute_step_budget
from training.setup import check_run

SECONDS = 60  # from the message to the end of all ranks: a few on an idle machine, but this is not a test of speed
OUR_FRAMES = 'trainer_base_ds_mp.py", line'  # in a stack trace; torchrun prints one of its own


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, converted, and records. Nothing in it is changed by a test."""
    root = tmp_path_factory.mktemp("bad_input")
    save_llama(root / "hf", num_hidden_layers=2)
    save_tokenizer(root / "hf")
    convert_to_pipeline(open_weights(str(root / "hf")), root / "checkpoint")
    save_records(root / "train.jsonl", 10)
    return root


def arguments(root: Path, out: Path, *overrides: str) -> list[str]:
    given = {
        "model_name_or_path": f"{root}/checkpoint",
        "train_file": f"{root}/train.jsonl",
        "output_dir": f"{out}/run",
        "data.cache_dir": f"{out}/cache",
        "eval_file": "null",
        "eval_steps": "null",
        "eval_on_start": "false",
        "micro_batch_size": "2",
        "global_batch_size": "4",
        "max_steps": "2",
    }
    for override in overrides:
        given.pop(override.partition("=")[0], None)
    return ["-cn", "llama_tiny_pp2", *(f"{key}={value}" for key, value in given.items()), *overrides]


def prepare_run(line: list[str], world_size: int) -> None:
    """Does what a run does before its first step, except the process group and the weights."""
    register_schema()
    cleaned = clean_arguments(["trainer_base_ds_mp.py", *line])[1:]
    composed = check_command_line(cleaned, CONF, "llama_tiny_pp2")
    config = to_typed(composed)
    ranks = Ranks(1, world_size, 1, world_size)  # not the main one: it prints nothing
    plan = check_run(config, ranks, list_given(cleaned))
    tokenizer = load_tokenizer(config, plan.source)
    datasets = tokenize(config, tokenizer, ranks.say)
    compute_step_budget(config, plan.layout, datasets, plan.resume_from, plan.architecture.vocab_size)


@pytest.fixture
def message_of(root: Path, tmp_path: Path) -> Callable[..., str]:
    """message_of(override, ..., world_size=2): the one line that a run with these overrides ends with."""

    def message(*overrides: str, world_size: int = 2) -> str:
        with pytest.raises(UserError) as caught:
            prepare_run(arguments(root, tmp_path, *overrides), world_size)
        text = str(caught.value)
        assert "\n" not in text and "???" not in text and "Error" not in text.replace("HFValidationError", ""), text
        return text

    return message


def test_without_a_mistake_there_is_no_message(root: Path, tmp_path: Path) -> None:
    prepare_run(arguments(root, tmp_path), world_size=2)


KEYS = {
    "unknown key": (("learning_rte=1",), "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
    "wrong type": (("num_stages=two",), "num_stages=two: must be a whole number"),
    "no value": (("train_file=???",), "train_file"),
    "a router's key for a dense model": (
        ("moe.aux_loss_coef=0.01",),
        "moe.aux_loss_coef=0.01: this 'llama' model has no experts; leave it at 0",
    ),
    "no such precision of routers": (("moe.router_dtype=fp8",), "moe.router_dtype=fp8: must be one of fp32, null"),
    "routers of a dense model": (
        ("moe.router_dtype=fp32",),
        "moe.router_dtype=fp32: this 'llama' model has no experts; leave it at null",
    ),
    "experts of a dense model": (
        ("expert_parallel_size=2",),
        "expert_parallel_size=2: this 'llama' model has no experts; leave it at 1",
    ),
    "a negative coefficient": (("moe.z_loss_coef=-1",), "moe.z_loss_coef=-1.0: 0 or more; 0 turns it off"),
    "nobody to tokenize": (("data.num_proc=0",), "data.num_proc=0: at least 1"),
    "no tensor parallelism at all": (("tensor_parallel_size=0",), "tensor_parallel_size=0: at least 1"),
    "no context parallelism at all": (("context_parallel_size=0",), "context_parallel_size=0: at least 1"),
    "an endless epsilon": (("optimizer.eps=inf",), "optimizer.eps=inf: a finite number, more than 0"),
    "an epsilon of nothing": (("optimizer.eps=nan",), "optimizer.eps=nan: a finite number, more than 0"),
    "a GPU that never computes": (("hardware.efficiency=0",), "hardware.efficiency=0.0: more than 0"),
    "a GPU without units": (
        ("hardware.peak_flops={bf16: 0, fp16: 0, fp32: 0}",),
        "hardware.peak_flops={'bf16': 0.0, 'fp16': 0.0, 'fp32': 0.0}: more than 0",
    ),
    "a node without GPUs": (("hardware.cards_per_node=0",), "hardware.cards_per_node=0: at least 1"),
    "an adapter that adds nothing": (
        ("adapter=lora", "adapter.lora_alpha=0"),
        "adapter.lora_alpha=0.0: a finite number of more than 0",
    ),
    "an adapter that adds no number": (
        ("adapter=lora", "adapter.lora_alpha=nan"),
        "adapter.lora_alpha=nan: a finite number of more than 0",
    ),
    "three batch sizes": (
        ("gradient_accumulation_steps=3",),
        "micro_batch_size=2 x gradient_accumulation_steps=3 x dp=1 is 6, not global_batch_size=4; give two of them",
    ),
    "stages beyond the layers": (
        ("num_stages=6",),
        "num_stages=6 exceeds the model's 5 layers (embedding, norm and head count as one each); "
        "set num_stages to 5 or less",
    ),
    "fp16 without a GPU": (
        ("precision=fp16",),
        "precision=fp16 does not go together with a machine without a GPU: DeepSpeed refuses it on a CPU; use "
        "precision=bf16",
    ),
    "flash attention without a GPU": (
        ("attn_implementation=flash_attention_2",),
        "attn_implementation=flash_attention_2 does not go together with a machine without a GPU: its kernels need "
        "CUDA; use",
    ),
    "another size": (("model=llama_7b",), "config.json says"),
    "a split that does not add up": (
        ("partition_method=[1,1]",),
        "partition_method=[1, 1] gives 2 layers to 2 stages; it must give 5",
    ),
    "a stage left empty": (
        ("partition_method=[5,0]",),
        "it must give 5 layers (embedding, norm and head count as one each) to num_stages=2, at least one each",
    ),
    "no such schedule": (("schedule=zigzag",), "schedule=zigzag: must be one of 1f1b, interleaved"),
    "one virtual stage": (("virtual_stages_per_rank=1",), "virtual_stages_per_rank=1: at least 2"),
    "too few layers to interleave": (
        ("schedule=interleaved", "virtual_stages_per_rank=3"),
        "num_stages=2 x virtual_stages_per_rank=3 is 6 chunks, and the model has 5 layers",
    ),
    "too few micro-batches to interleave": (
        ("schedule=interleaved", "global_batch_size=2"),
        "schedule=interleaved needs a number of micro-batches that is a multiple of num_stages=2; "
        "gradient_accumulation_steps=1 is not, the nearest is 2",
    ),
    "no such checkpointing": (
        ("activation_checkpoint_mode=some",),
        "activation_checkpoint_mode=some: must be one of grouped, every, selective",
    ),
    "a step to draw beyond the end": (
        ("profile_step=9", "max_steps=3"),
        "profile_step: there is no step 9, the run has 3; give steps of the run, or omit the key",
    ),
    "a step to trace beyond the end": (
        ("profile_trace=9", "max_steps=3"),
        "profile_trace: there is no step 9, the run has 3; give steps of the run, or omit the key",
    ),
    "a step to export beyond the end": (
        ("export_steps=[2,9]", "max_steps=3"),
        "export_steps: there is no step 9, the run has 3; give steps of the run, or omit the key",
    ),
    "data to skip beyond the end": (
        ("skip_data_intervals=[[2,2],[3,4]]", "max_steps=3"),
        "skip_data_intervals: there is no step 4, the run has 3; give steps of the run, or omit the key",
    ),
    "a length without a target": (("max_seq_length=1",), "max_seq_length=1: at least 2"),
    "no such policy": (("data.length_policy=cut",), "data.length_policy=cut: must be one of truncate, drop, split"),
    "raw text not packed": (
        ("data=pretrain", "data.packing=false"),
        "data=pretrain does not go together with data.packing=false: documents are laid end to end; omit data.packing",
    ),
    "no such kind": (
        ("data=dialogue",),
        f"data=dialogue: there is no conf/data/dialogue.yaml; there are {', '.join(sorted(KINDS))}",
    ),
    "no such task": (("task=ppo",), "task=ppo: must be one of classification, cpo, dpo, "),
    "preferences without pairs": (
        ("task=dpo",),
        "task=dpo and data=sft do not go together; give data=preference, or task=sft",
    ),
    "rewards without pairs": (
        ("task=reward",),
        "task=reward and data=sft do not go together; give data=preference, or task=sft",
    ),
    "rewards that push apart": (
        ("data=preference", "task=reward", "reward.centering_coef=-1"),
        "reward.centering_coef=-1.0: 0 or more; 0 turns it off",
    ),
    "pairs without preferences": (
        ("data=preference", "task=sft"),
        "task=sft and data=preference do not go together; give data=sft or data=chat or data=image_chat, or task=dpo",
    ),
    "preferences in pieces": (
        ("data=preference", "data.length_policy=split"),
        "data=preference does not go together with data.length_policy=split: an answer that is split cannot be "
        "preferred",
    ),
    "no room from the reference": (("data=preference", "dpo.beta=0"), "dpo.beta=0.0: more than 0"),
    "no preference left": (
        ("data=preference", "dpo.label_smoothing=0.5"),
        "dpo.label_smoothing=0.5: from 0 to below 0.5; at 0.5 no preference is left",
    ),
    "a smoothing that nothing reads": (
        ("data=preference", "dpo.loss_type=ipo", "dpo.label_smoothing=0.1"),
        "dpo.label_smoothing=0.1 does not go together with dpo.loss_type=ipo: it is the share of flipped labels",
    ),
    "no such loss": (("data=preference", "dpo.loss_type=slic"), "dpo.loss_type=slic: must be one of sigmoid, ipo"),
    "a key of another objective": (
        ("data=preference", "task=simpo", "dpo.beta=0.2"),
        "dpo.beta=0.2: this run does not read it, only one with task=dpo does; give that, or omit the key",
    ),
    "a weight below zero": (
        ("train_file=[{path: a.jsonl, weight: -1}]",),
        "train_file: entry 1 has weight=-1; give a number of 0 or more",
    ),
    "nothing in the mixture": (("train_file=[{path: a.jsonl, weight: 0}]",), "train_file: every entry has weight 0"),
    "shares of two kinds": (
        ("train_file=[{path: a.jsonl, weight: 1}, {path: b.jsonl, epochs: 1}]",),
        "train_file: give every entry a weight, or every",
    ),
    "a share left out": (
        ("train_file=[{path: a.jsonl, weight: 1}, b.jsonl]",),
        "train_file: give every entry a weight, or every entry a number of epochs",
    ),
    "a source without a path": (
        ("train_file=[{file: a.jsonl, weight: 1}]",),
        "train_file: entry 1 is {'file': 'a.jsonl', 'weight': 1}; give a path",
    ),
    "a misnamed weight": (
        ("train_file=[{path: a.jsonl, wieght: 1}]",),
        "train_file: entry 1 has an unknown key 'wieght'; known are path, weight, epochs",
    ),
    "an evaluation mixture": (
        ("eval_file=[{path: a.jsonl, weight: 1}]",),
        "eval_file takes no weight: evaluation reads every sample once",
    ),
    "no encoder": (
        ("data.encoder={_target_: json.JSONDecoder}",),
        "data.encoder: json.JSONDecoder must be a dataclass with a method encode",
    ),
    "an encoder that is text": (
        ("data.encoder=json",),
        "data.encoder=json: give a mapping, such as {_target_: my_data.MyEncoder",
    ),
    "an encoder without a name": (
        ("data.encoder={field: a}",),
        "data.encoder: _target_=None; name a class or a function with its module",
    ),
    "no collator": (
        ("data.collator={_target_: json.JSONDecoder}",),
        "data.collator: json.JSONDecoder must be a class with the methods collate_inputs and",
    ),
    "no loss": (
        ("loss={_target_: json.JSONDecoder}",),
        "loss: json.JSONDecoder must be a class whose objects are called with (outputs, targets)",
    ),
    "a loss that is text": (
        ("loss=focal",),
        "loss=focal: give a mapping, such as {_target_: my_losses.MyLoss, field: value}",
    ),
    "a loss that is not there": (
        ("loss={_target_: json.Loss}",),
        "loss: _target_=json.Loss: the module json has no class or function 'Loss'",
    ),
    "a reader that is not there": (
        ("train_file={_target_: json.read}",),
        "train_file: entry 1: _target_=json.read: the module json has no class",
    ),
    "nothing to resume": (("resume=latest",), "resume=latest: there is no checkpoint at"),
    "a converted folder to resume": (
        ("resume={root}/checkpoint",),
        "checkpoint/global_step0 is not a training checkpoint",
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key(name: str, message_of: Callable[..., str], root: Path) -> None:
    overrides, expected = KEYS[name]
    assert expected in message_of(*(override.replace("{root}", str(root)) for override in overrides))


def test_stages_that_do_not_divide_the_ranks(message_of: Callable[..., str]) -> None:
    message = message_of(world_size=1)
    assert message.startswith(
        "num_stages=2 does not divide the number of started ranks, 1; start it with `deepspeed --num_gpus 2 "
        "trainer_base_ds_mp.py"
    )
    assert "without GPUs" in message
    assert "--num_gpus 4" in message_of(world_size=3)


def test_an_older_deepspeed(message_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.config.validate.version", lambda name: "0.18.9")
    message = message_of()
    assert message.startswith("deepspeed 0.18.9 is too old: releases before 0.19.4 lack what this project builds on")
    assert "install deepspeed>=" in message


def test_a_run_on_top_of_another(message_of: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").touch()
    message = message_of()
    assert (
        message.startswith(f"output_dir={tmp_path}/run holds checkpoints")
        and "resume=latest" in message
        and "overwrite_output_dir=true" in message
    )


def test_an_empty_output_dir_is_not_the_working_directory(message_of: Callable[..., str]) -> None:
    assert message_of("output_dir=").startswith("output_dir= is empty; give a folder of the run's own")


def edit_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


WEIGHTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing": (shutil.rmtree, ("model_name_or_path '{folder}' is not a folder here",)),
    "no checkpoint": (
        lambda d: (d / "config.json").unlink(),
        ("{folder} holds no config.json",),
    ),
    "half-copied": (
        lambda d: (d / "global_step0/layer_03-model_states.pt").unlink(),
        ("{folder}/global_step0 is incomplete", "layer_03-model_states.pt"),
    ),
    "without its step": (
        lambda d: shutil.rmtree(d / "global_step0"),
        ("{folder}/latest names 'global_step0', but there is no such folder; copy the checkpoint again",),
    ),
    "of another architecture": (
        lambda d: edit_json(d / "config.json", model_type="bert"),
        ("model_type 'bert' has no file in models/", "docs/add_a_model.md"),
    ),
    "of another depth": (lambda d: edit_json(d / "config.json", num_hidden_layers=3), ("layer_05-model_states.pt",)),
    "without a tokenizer": (
        lambda d: [f.unlink() for f in d.glob("tokenizer*")],
        ("no tokenizer in {folder}", "set tokenizer_name_or_path"),
    ),
    "of a smaller vocabulary": (
        lambda d: edit_json(d / "config.json", vocab_size=300),
        ("has 320 tokens, the embedding 300 rows", "--add_special_tokens"),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, message_of: Callable[..., str], root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(root / "checkpoint", tmp_path / "copy"))
    damage, expected = WEIGHTS[name]
    damage(folder)
    message = message_of(f"model_name_or_path={folder}")
    assert all(part.format(folder=folder) in message for part in expected), message


RECORD = {"prompt": "a question", "completion": "an answer"}
DATA: dict[str, tuple[str | bytes, tuple[str, ...], str]] = {
    "malformed line": (json.dumps(RECORD) + '\n{"prompt": "a"\n', (), "{file}:2: not valid JSON"),
    "empty": ("\n\n", (), "train_file holds no records ({file}); give a file that does"),
    "too few": (
        json.dumps(RECORD) + "\n",
        (),
        "train_file holds fewer samples (1) than one global batch (global_batch_size=4); lower global_batch_size",
    ),
    "too few to pack": (
        json.dumps(RECORD) + "\n" * 9,
        ("data.packing=true",),
        "train_file holds fewer packed rows (1) than one global batch (global_batch_size=4)",
    ),
    "too long": (
        json.dumps({**RECORD, "prompt": "word " * 99}) + "\n",
        ("data.length_policy=drop",),
        "train_file: none of its 1 record is left: 0 skipped as bad, 1 dropped",
    ),
    "all skipped": (
        "{}\n",
        ("data.on_bad_record=skip",),
        "train_file: none of its 1 record is left: 1 skipped as bad",
    ),
    "other fields": (
        '{"question": "a", "answer": "b"}\n',
        (),
        "{file}:1: no field 'prompt'; the record has 'question', 'answer'; set data.prompt_field",
    ),
    "no conversation": ('{"prompt": "a"}\n', ("data=chat",), "{file}:1: no field 'messages', nor those of ShareGPT"),
    "no text": (
        '{"prompt": "a"}\n',
        ("data=pretrain",),
        "{file}:1: no field 'text'; the record has 'prompt'; set data.text_field",
    ),
    "misnamed field": (
        json.dumps(RECORD) + "\n",
        ("data.completion_field=reply",),
        "{file}:1: no field 'reply'; the record has 'prompt', 'completion'",
    ),
    "no template": (
        '{"messages": [{"role": "user", "content": "a"}]}\n',
        ("data=chat",),
        "{file}:1: the record holds messages, but the tokenizer has no chat template",
    ),
    "empty completion": (
        json.dumps({**RECORD, "completion": " "}) + "\n",
        (),
        "{file}:1: field 'completion' is empty; fill it or remove the record",
    ),
    "another encoding": (
        json.dumps(RECORD).encode() + b'\n{"prompt": "caf\xe9"}\n',
        (),
        "{file}:2: not UTF-8 text (byte 0xe9 at position 15); convert the file to UTF-8",
    ),
    "UTF-16": (
        json.dumps(RECORD).encode("utf-16"),
        (),
        "{file}:1: not UTF-8 text (byte 0xff at position 0); convert the file to UTF-8",
    ),
    "no answers": (
        json.dumps(RECORD) + "\n",
        ("data=preference",),
        "{file}:1: no field 'chosen'; the record has 'prompt', 'completion'; set data.chosen_field",
    ),
    "nothing preferred": (
        json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}) + "\n",
        ("data=preference",),
        "{file}:1: fields 'chosen' and 'rejected' are the same",
    ),
    "too few pairs": (
        json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n",
        ("data=preference",),
        "train_file holds fewer pairs (1) than one global batch",
    ),
    "cut away": (json.dumps({**RECORD, "prompt": "word " * 99}) + "\n", (), "{file}:1: the prompt has"),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name: str, message_of: Callable[..., str], tmp_path: Path) -> None:
    text, overrides, expected = DATA[name]
    file = tmp_path / "records.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message_of(f"train_file={file}", "max_seq_length=64", *overrides).startswith(expected.format(file=file))


def test_a_file_that_is_not_there(message_of: Callable[..., str], tmp_path: Path) -> None:
    assert message_of(f"train_file={tmp_path}/no.jsonl").startswith(f"train_file: no such file: {tmp_path}/no.jsonl")
    message = message_of(f"eval_file={tmp_path}/no.jsonl")
    assert message.startswith(f"eval_file: no such file: {tmp_path}/no.jsonl"), message


def assert_one_message(ended: Ended, *parts: str) -> None:
    assert ended.code not in (0, None) and ended.left_alive == [], ended.output
    assert ended.seconds_after_error < SECONDS
    (line,) = ended.errors()
    assert all(part in line for part in parts), line
    assert OUR_FRAMES not in ended.output, ended.output


def test_a_mistyped_key_alone(root: Path, tmp_path: Path) -> None:
    ended = run_alone(arguments(root, tmp_path, "learning_rte=1"), tmp_path)
    assert_one_message(ended, "error: unknown key 'learning_rte'; did you mean 'learning_rate'?")
    assert ended.output.strip() == ended.errors()[0] and ended.code == 1


@pytest.mark.full
def test_stages_that_do_not_divide_through_the_launcher(root: Path, tmp_path: Path) -> None:
    ended = run_deepspeed(arguments(root, tmp_path, "num_stages=3"), tmp_path)
    assert_one_message(
        ended,
        "error: num_stages=3 does not divide the number of started ranks, 2; start it with `deepspeed --num_gpus 3 "
        "trainer",
    )
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [".lock", "ended.json"]
    assert RunFolder(tmp_path / "run").read_ended()["reason"] == "mistake"


@pytest.mark.full
def test_a_malformed_line_through_the_launcher(root: Path, tmp_path: Path) -> None:
    """Only the first rank reads the file; the other one waits for it."""
    file = tmp_path / "train.jsonl"
    file.write_text((root / "train.jsonl").read_text() + '{"prompt": "a", "completion": \n')
    assert_one_message(
        run_deepspeed(arguments(root, tmp_path, f"train_file={file}"), tmp_path),
        "error",
        f"{file}:11: not valid JSON",
        "fix or remove the line",
    )


@pytest.mark.full
def test_a_layer_of_another_model_through_the_launcher(root: Path, tmp_path: Path) -> None:
    """Only the rank that loads the layer finds out; the other one is about to talk to it."""
    folder = Path(shutil.copytree(root / "checkpoint", tmp_path / "copy"))
    layer = folder / "global_step0" / "layer_04-model_states.pt"
    (layer.parent / "manifest.json").unlink()  # by which rank 0 would find out
    torch.save({name: tensor[:1].clone() for name, tensor in torch.load(layer).items()}, layer)
    ended = run_deepspeed(arguments(root, tmp_path, f"model_name_or_path={folder}"), tmp_path)
    assert_one_message(ended, f"error (rank 1): {layer}: 'lm_head.weight' has shape [1, 48], config.json makes it")


@pytest.mark.full
def test_too_few_samples_through_torchrun(root: Path, tmp_path: Path) -> None:
    """Only the first rank counts them; the other one waits, and must not bury the message in a stack trace."""
    ended = run_torchrun(arguments(root, tmp_path, "global_batch_size=12"), tmp_path)
    assert_one_message(
        ended, "error (rank 0): train_file holds fewer samples (10) than one global batch (global_batch_size=12)"
    )


LOSS = """
class Loss:
    def __call__(self, outputs, targets):
        raise KeyError("the head's name")
"""


@pytest.mark.full
@pytest.mark.parametrize("start", [run_deepspeed, run_torchrun])
def test_an_unexpected_exception_is_one_line_and_its_trace_is_in_the_log(
    start: Callable[..., Ended], root: Path, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(LOSS)
    ended = start(arguments(root, tmp_path, "loss={_target_: failing.Loss}"), tmp_path)
    logs = tmp_path / "run" / "logs"
    assert_one_message(ended, f'error (rank 1): KeyError: "the head\'s name"; the stack trace is in {logs}/rank_1.log')
    assert (
        "failing.py" in (logs / "rank_1.log").read_text()
        and "failing.py" not in ended.output.partition("error (rank 1)")[2]
    )
