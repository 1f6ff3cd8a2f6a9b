"""Which run reads which key: one table. From it, a key that was given and that the run does not read is named.

A key that is not in the table is read by every run, or the checks of its own feature refuse it where nothing reads it.
The entries come from what reads a key wherever that says so: the fields of an encoder, the group of an objective, the
tables of optimizers and schedules. tests/training/resolution/test_readers.py compares the table with the keys that runs
are seen to read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from data.encoders.kinds import KINDS, find_keys
from errors import UserError
from extension import load_extensions, load_part
from models.adapters.options import AdapterName
from training.config.incompatible import LORA, STREAMED, CheckedConfig, Feature, has_value, write_value
from training.config.key_table import list_types
from training.config.schema import find_default
from training.config.sources import list_evaluations, parse_key
from training.objectives.registry import OBJECTIVES, get_objective
from training.optim.lr_schedule import SCHEDULER_KEYS
from training.optim.optimizer import OPTIMIZER_KEYS
from training.pipeline.schedules import SCHEDULE_KEYS

# Keys that are read for an adapter that exists (adapter.name_or_path) too; its own config has the others
NOT_BROUGHT = ("adapter.name_or_path", "adapter.loraplus_lr_ratio", "adapter.load_in_4bit", "adapter.keep_quantized")
# Keys of `data` that more than the encoder reads, so also with a user-defined one
BEYOND_THE_ENCODER = ("labels", "problem_type")
# Keys of `data` that are read with any data: for the tokenizer
WITH_ANY_DATA = {"chat_template"}


@dataclass(frozen=True)
class Unread:
    """A key that was given and that the run does not read. text: key and value. reader: what a run needs to read it."""

    key: str
    text: str
    reader: Feature


def check_read(run: CheckedConfig, given: Collection[str], *, continues: bool) -> list[str]:
    """Return in words the keys that the run does not read, those of its config file, and all of them where a run
    continues. Not named are those of the config file whose reader the command line turns off.

    given: the keys that the command line gives and the groups that it chooses. continues: the run is resumed, and goes
    on as it began. Raises UserError for such a key on the command line, and for one of an adapter where there is none,
    since the whole model would be trained.
    """
    unread = list(find_unread(run, given))
    for each in () if continues else unread:
        asks_for_adapter = each.key.startswith("adapter.") and run.config.adapter.name is AdapterName.none
        if _is_given(each.key, given) or (asks_for_adapter and "adapter" not in given):
            raise UserError(
                f"{each.text}: this run does not read it, only one with {each.reader.words} does; give that, or omit "
                "the key"
            )
    named = (each for each in unread if _is_given(each.key, given) or not _is_turned_off(run, each.reader, given))
    return [f"{each.text} is not read, only by a run with {each.reader.words}" for each in named]


def find_unread(run: CheckedConfig, given: Collection[str]) -> Iterator[Unread]:
    """Yield the keys that the run does not read, among those that `given` names or whose value is not the default. A
    default that asks for nothing (null, false, 0, one of several words) is never named."""
    for key, reader in list_readers().items():
        value, default = run.read(key), find_default(run.config, key)
        asks_for_nothing = not _is_given(key, given) or not value or isinstance(value, Enum)
        if not (value == default and asks_for_nothing) and not reader.holds(run):
            yield Unread(key, f"{key}={write_value(value)}", reader)


def _is_turned_off(run: CheckedConfig, reader: Feature, given: Collection[str]) -> bool:
    """Return whether the command line turns off what would read a key."""
    return any(key in given and run.read(key) is None for key in reader.switches)


def _is_given(key: str, given: Collection[str]) -> bool:
    """Return whether a key, or one in the mapping that is its value, is in `given`."""
    return any(each == key or each.startswith(f"{key}.") for each in given)


@cache
def list_readers() -> dict[str, Feature]:
    """Return key -> what a run needs to read it."""
    return {
        **{f"data.{name}": _by_encoder(name) for name in _list_fields()},
        **{key: LORA if key in NOT_BROUGHT else NEW_LORA for key in _list_under("adapter")},
        **{key: _by_task(name) for name in OBJECTIVES for key in _list_under(name)},
        **{key: TRACKED for key in _list_under("logger") if key != "logger.trackers"},
        **_by_choice("optimizer.name", OPTIMIZER_KEYS),
        **_by_choice("lr_scheduler_type", SCHEDULER_KEYS),
        **{key: _or_searched(reader) for key, reader in _by_choice("schedule", SCHEDULE_KEYS).items()},
        **OTHERS,
        **{key: reader for readers in _list_added() for key, reader in readers.items()},
    }


def _list_added() -> list[dict[str, Feature]]:
    """Return what runs need to read the keys of extensions."""
    return [load_part(extension.readers) for extension in load_extensions() if extension.readers]


def _list_under(group: str) -> list[str]:
    return [key for key in list_types() if key.startswith(f"{group}.")]


def _by_choice(choice: str, keys_of: Mapping[str, Collection[str]]) -> dict[str, Feature]:
    """Return the readers of keys that belong to some values of a choice. keys_of: value -> keys."""
    keys = dict.fromkeys(key for keys in keys_of.values() for key in keys)
    return {key: has_value(choice, *[value for value, each in keys_of.items() if key in each]) for key in keys}


def _or_searched(reader: Feature) -> Feature:
    """Return the reader of a key of a layout: that of a run that is laid out so, and a plan of several layouts."""
    return replace(reader, holds=lambda run: reader.holds(run) or run.config.varies_layout)


def _list_fields() -> list[str]:
    """Return the names of the keys of `data` that encoders read, without those that are read with any data."""
    read = set().union(*map(find_keys, KINDS.values()))
    return [name for key in _list_under("data") if (name := key.removeprefix("data.")) in read - WITH_ANY_DATA]


def _by_encoder(field: str) -> Feature:
    by_kind = has_value("data.name", *[name for name, kind in KINDS.items() if field in find_keys(kind)])
    if field in BEYOND_THE_ENCODER:
        return by_kind

    def holds(run: CheckedConfig) -> bool:
        return by_kind.holds(run) and run.config.data.encoder is None

    return Feature(f"{by_kind.words} without data.encoder", holds)


def _by_task(name: str) -> Feature:
    return Feature(f"task={name}", lambda run: get_objective(run.config).name == name)


def _counts_correct(run: CheckedConfig) -> bool:
    return get_objective(run.config).takes_user_loss and run.config.loss is None and EVALUATED.holds(run)


def _divides_experts(run: CheckedConfig) -> bool:
    return run.config.expert_parallel_size > 1 or (run.config.varies_layout and run.has_experts)


NEW_LORA = Feature(
    "adapter=lora without adapter.name_or_path",
    lambda run: LORA.holds(run) and not run.config.adapter.name_or_path,
)
TRACKED = Feature("logger", lambda run: bool(run.config.logger.trackers))
EVALUATED = Feature(
    "eval_file, data.eval_fraction or data.eval_samples",
    lambda run: bool(list_evaluations(run.config)),
    switches=("eval_file", "data.eval_fraction", "data.eval_samples"),
)
OTHERS = {
    "resume_allow_changes": Feature("resume", lambda run: run.config.resume is not None),
    "data.mixture_by": Feature(
        "shares in train_file", lambda run: parse_key(run.config, "train_file").mixture is not None
    ),
    "data.shuffle_block": STREAMED,
    "moe.imbalance": Feature("expert_parallel_size=2 or more", _divides_experts),
    "num_train_epochs": has_value("max_steps", "null"),
    **dict.fromkeys(
        ("eval_steps", "eval_epochs", "eval_on_start", "metric_for_best_model", "greater_is_better"), EVALUATED
    ),
    # Without patience too: checkpoints hold the count that a resumed run with patience starts from
    "early_stopping_threshold": EVALUATED,
    "eval_token_accuracy": replace(EVALUATED, words="an evaluation of next tokens", holds=_counts_correct),
    "world_size": Feature("plan=true", lambda run: run.config.plan is not False),
}
