"""Overrides that are refused: for each pair of the table, made of the words of its features; and for what spans keys
otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from training.config.incompatible import Feature, Pair

# The words of a feature -> an override that gives a run the feature, where the words do not say it
ASKED_BY = {
    "a machine without a GPU": "",
    "plan=true with hardware=here": "plan=true",
    "a schedule other than 1f1b": "schedule=interleaved",
    "data with a loss of its own": "data=preference",
    "model=from_checkpoint": "model={}",
    "train_file with shares": "train_file=[{path: a.jsonl, weight: 1}]",
    "loss={_target_: ...}": "loss={_target_: my.Loss}",
    "eval_steps=null and eval_epochs=null": "eval_steps=null",
    "callbacks": "callbacks=[{_target_: my.Callback}]",
    "data.chat_template": "data.chat_template=chatml",
    "data.collator": "data.collator={_target_: my.Collator}",
    "data.eval_fraction": "data.eval_fraction=0.1",
    "adapter=lora without adapter.name_or_path and resume": "adapter=lora",
    "distill.teacher": "distill.teacher=a",
    "eval_file": "eval_file=a.jsonl",
    "freeze": "freeze=[norm]",
    "resume": "resume=latest",
    "warmup_ratio": "warmup_ratio=0",
}
# An override -> what else a run with it needs, so that nothing but the pair is refused
NEEDS = {
    "plan=true": ("hardware=here", "hardware.peak_flops=null"),
    "schedule=zero_bubble": ("num_stages=2",),
    "sequence_parallel=true": ("tensor_parallel_size=2",),
    "data=pretrain": ("data.packing=true", "data.length_policy=split"),
    "data=rerank": ("data.num_negatives=1",),
    "data.streaming=true": ("max_steps=5",),
    "distill.online=true": ("distill.teacher=a",),
    "dpo.label_smoothing=0.1": ("data=preference",),
    "init=random": ("model={model_type: llama}", "tokenizer_name_or_path=t"),
    "evaluate_only=true": ("eval_file=a.jsonl",),
    "keep_best=2": ("keep_last=1", "eval_file=a.jsonl"),
    "early_stopping_patience=2": ("eval_file=a.jsonl", "eval_steps=1"),
}
# Keys above 0 that are not whole numbers
FRACTIONS = ("loss_coef", "lora_dropout", "label_smoothing", "neftune_noise_alpha", "update_router_bias")
# For each other refusal of training/config/ but those of ranges, which the fields state
OTHERS = (
    ("train_file=null",),
    ("eval_file={}",),
    ("eval_file={weight: c.jsonl}",),
    ("train_file=[{path: a, weight: 1}, b]",),
    ("train_file=[{path: a, weight: 0}]",),
    ("train_file=[{path: a, wieght: 1}]",),
    ("train_file=[{path: a, weight: -1}]",),
    ("train_file=[{weight: 1}]",),
    ("eval_file=[{path: a, weight: 1}]",),
    ("plan=maybe",),
    ("export_steps=[0]",),
    ("skip_data_intervals=[[3,1]]",),
    ("skip_data_intervals=[[1,3]]", "profile_step=2"),
    ("optimizer.betas=[0.9]",),
    ("optimizer.betas=[0.9,0.999]", "optimizer.state_dtype=bf16"),
    ("+model.no_such_field=1",),
    ("+model.hidden_size=64",),
)


def list_examples(pair: Pair) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a start of the message and overrides that are refused with it, for each of the values of both features."""
    for first, second in product(_list_overrides(pair.first), _list_overrides(pair.second)):
        shown = (
            override if feature.key else feature.words
            for feature, override in zip((pair.first, pair.second), (first, second))
        )
        yield " does not go together with ".join(shown) + ": ", (*_complete(first), *_complete(second))


def _list_overrides(feature: Feature) -> list[str]:
    """Return an override that gives a run the feature, for each of its values."""
    if feature.words in ASKED_BY:
        return [ASKED_BY[feature.words]]
    if " > " in feature.words:
        key, _, limit = feature.words.partition(" > ")
        return [f"{key}={0.1 if key.endswith(FRACTIONS) else int(limit) + 1}"]
    key, _, values = feature.words.partition("=")
    return [f"{key}={value}" for value in (values or "2").split(" or ")]


def _complete(override: str) -> tuple[str, ...]:
    """Return the override and before it what else a run with it needs."""
    adapter = ("adapter=lora",) if override.startswith("adapter.") else ()
    return *adapter, *NEEDS.get(override, ()), *([override] if override else [])
