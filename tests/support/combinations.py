"""The axes and features of a run as a table of values, and the smallest sets of runs that cover them.

`cover` makes rows in which every value, or every pair of values of two axes, occurs, but for what the table of
training/config/incompatible.py refuses. It is greedy and draws nothing, so it gives the same rows each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from support.configs import set_keys

from data.encoders.kinds import ADDED_KINDS
from training.config.incompatible import CheckedConfig, Pair, list_pairs
from training.config.schema import RunConfig

Row = dict[str, str]  # axis -> value
Values = tuple[tuple[str, str], ...]  # (axis, value), in the order of the axes

# Kinds of data that are not an objective by their name: the first is "dpo" and "orpo", KTO has tests of its own
ANSWERS = ("preference", "unpaired_preference")

OWN_LOSS = "loss={_target_: support.combination_runs.OwnLoss}"
ADAMW = ("optimizer=adamw", "optimizer.eps=0.01")  # Adam divides rounding by itself
MOMENTUM = "optimizer.custom={_target_: torch.optim.SGD, momentum: 0.9, nesterov: true}"
SECOND_LAYER = "{pattern: '(layers|h|blocks)[.]1[.]', learning_rate: 1e-4, weight_decay: 0.3}"
# Axis -> value -> the keys that say it. The first value of each is the plainest, which rows take where nothing asks for
# another.
AXES: dict[str, dict[str, tuple[str, ...]]] = {
    "layout": {
        "pp1": ("num_stages=1",),
        "pp2": ("num_stages=2",),
        "tp2": ("tensor_parallel_size=2",),
        "cp2": ("context_parallel_size=2",),
        "dp2": ("num_stages=1",),
        "pp2xdp2": ("num_stages=2",),
        "tp2xpp2": ("num_stages=2", "tensor_parallel_size=2"),
        "ep2": ("num_stages=1", "expert_parallel_size=2"),
        "ep2xpp2": ("num_stages=2", "expert_parallel_size=2"),
    },
    "objective": {
        "sft": ("data=sft",), "pretrain": ("data=pretrain",),
        "dpo": ("data=preference",), "orpo": ("data=preference", "task=orpo"),
        # Images need a model with a tower: `tests/extensions/images`
        **{kind.name: (f"data={kind.name}",) for kind in ADDED_KINDS if kind.name not in ANSWERS and not kind.front},
    },
    "precision": {"fp32": ("precision=fp32",), "bf16": ("precision=bf16",), "fp16": ("precision=fp16",)},
    "recompute": {
        "none": ("activation_checkpoint_interval=0", "activation_checkpoint_mode=grouped"),
        "grouped": ("activation_checkpoint_interval=2", "activation_checkpoint_mode=grouped"),
        "every": ("activation_checkpoint_interval=2", "activation_checkpoint_mode=every"),
        "selective": ("activation_checkpoint_interval=1", "activation_checkpoint_mode=selective"),
    },
    "schedule": {
        "1f1b": ("schedule=1f1b",),
        "interleaved": ("schedule=interleaved",),
        "zero_bubble": ("schedule=zero_bubble",),
    },
    "adapter": {
        "none": ("adapter=none",),
        "lora": ("adapter=lora",),
        "dora": ("adapter=lora", "adapter.use_dora=true"),
        "dropout": ("adapter=lora", "adapter.lora_dropout=0.1"),
    },
    "attention": {
        "auto": ("attn_implementation=auto",),
        "sdpa": ("attn_implementation=sdpa",),
        "varlen": ("attn_implementation=varlen",),
        "eager": ("attn_implementation=eager",),
        "flash": ("attn_implementation=flash_attention_2",),
        "flex": ("attn_implementation=flex_attention",),
    },
    "length": {
        "truncate": ("data.length_policy=truncate",),
        "drop": ("data.length_policy=drop",),
        "split": ("data.length_policy=split",),
    },
    "packing": {"false": ("data.packing=false",), "true": ("data.packing=true",)},
    "pad_to": {"longest": ("data.pad_to=longest",), "full": ("data.pad_to=max_seq_length",)},
    "micro_batch": {"2": ("micro_batch_size=2",), "1": ("micro_batch_size=1",)},
    "freeze": {"nothing": ("freeze=[]",), "layer": ("freeze=['(layers|h|blocks)[.]0[.]']",)},
    "optimizer": {
        "sgd": ("optimizer=sgd",),
        "adamw": ADAMW,
        "adamw in bf16": (*ADAMW, "optimizer.state_dtype=bf16", "learning_rate=2e-4"),
        "8 bits": ("optimizer=adamw_8bit", "optimizer.eps=0.01", "learning_rate=2e-4"),
        "lion": ("optimizer=lion", "learning_rate=1e-3"),
        "momentum": ("optimizer=custom", MOMENTUM),
    },
    "groups": {
        "alike": ("parameter_groups=[]",),
        "patterns": (f"parameter_groups=[{SECOND_LAYER}]",),
    },
    "zero": {f"zero{stage}": (f"zero_stage={stage}",) for stage in (1, 2, 3)},
    "offload": {"none": ("offload_optimizer=none",), "cpu": ("offload_optimizer=cpu",)},
    "clipping": {"off": ("max_grad_norm=0",), "on": ("max_grad_norm=0.05",)},
    "loss": {"of the objective": ("loss=null",), "own": (OWN_LOSS,)},
    "routers": {  # of a mixture of experts
        "plain": ("moe.aux_loss_coef=0", "moe.z_loss_coef=0"),
        "balanced": ("moe.aux_loss_coef=0.1", "moe.z_loss_coef=0.01"),
    },
    "compile": {"false": ("compile=false",), "true": ("compile=true",)},
    "tied": {"false": (), "true": ()},
}  # fmt: skip
# Taken by a row only where it is asked for: g++ takes half a minute.
SLOW = frozenset({("compile", "true")})
RANKS = {"pp1": 1, "pp2": 2, "tp2": 2, "cp2": 2, "dp2": 2, "pp2xdp2": 4, "tp2xpp2": 4, "ep2": 2, "ep2xpp2": 4}


def list_keys(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(key for axis, value in row.items() for key in AXES[axis][value])


class Refusals:
    """Which values of two axes the table of incompatible features keeps apart on this machine."""

    def __init__(self, base: RunConfig, table: Sequence[Pair] | None = None, has_accelerator: bool = False) -> None:
        table = list_pairs() if table is None else table
        self._base, self._table, self._has_accelerator = base, table, has_accelerator
        self._listed = {id(feature): feature for pair in table for feature in (pair.first, pair.second)}
        self._known: dict[Values, bool] = {}
        self._having: dict[tuple[str, str], set[int]] = {}  # features of the value, where its axis decides them
        for axis, values in AXES.items():
            found = {value: self._features({axis: value}) for value in values}
            changing = set.union(*found.values()) - set.intersection(*found.values())
            self._having |= {(axis, value): features & changing for value, features in found.items()}
        # and those that no value changes: the machine's
        self._always = self._features({}) - set.union(*self._having.values())

    def run(self, row: Mapping[str, str]) -> CheckedConfig:
        return CheckedConfig(set_keys(self._base, *list_keys(row)), self._has_accelerator)

    def _features(self, row: Mapping[str, str]) -> set[int]:
        run = self.run(row)
        return {key for key, feature in self._listed.items() if feature.holds(run)}

    def refuses(self, first: tuple[str, str], second: tuple[str, str]) -> bool:
        """Returns whether the table of incompatible pairs has both, or one of them and the machine."""
        if (first, second) not in self._known:
            having = self._having[first] | self._having[second] | self._always
            refused = any(id(pair.first) in having and id(pair.second) in having for pair in self._table)
            self._known[first, second] = refused
        return self._known[first, second]


def list_combinations(axes: Mapping[str, object], strength: int) -> Iterator[Values]:
    """All combinations of so many values, of different axes."""
    for chosen in combinations(axes, strength):
        tuples: list[Values] = [()]
        for axis in chosen:
            tuples = [(*values, (axis, value)) for values in tuples for value in AXES[axis]]
        yield from tuples


def cover(refusals: Refusals, strength: int, without: frozenset[tuple[str, str]] = frozenset()) -> list[Row]:
    """Rows in which every combination of so many values occurs that can occur. without: values that no row has."""
    pending = dict.fromkeys(each for each in list_combinations(AXES, strength) if not without & set(each))
    rows = []
    while pending:
        seed = next(iter(pending))
        row = _complete(dict(seed), refusals, pending, without)
        for each in [seed] if row is None else combinations(row.items(), strength):
            pending.pop(each, None)
        if row is not None:
            rows.append(row)
    return rows


def _complete(
    row: Row, refusals: Refusals, pending: Mapping[Values, None], without: frozenset[tuple[str, str]]
) -> Row | None:
    """Returns the row with values for all axes that covers the most pending combinations, or None if there is none."""
    given = list(row.items())
    if any(refusals.refuses(one, other) for one in given for other in given):
        return None
    missing = [axis for axis in AXES if axis not in row]
    if not missing:
        return {axis: row[axis] for axis in AXES}
    axis = missing[0]

    def count_new(value: str) -> int:
        return sum(_in_order(*given_one, (axis, value)) in pending for given_one in combinations(given, _size(pending)))

    allowed = [(axis, value) for value in AXES[axis] if (axis, value) not in without]
    # stable: the plainest of equals first
    for _, value in sorted(allowed, key=lambda entry: (entry in SLOW, -count_new(entry[1]))):
        found = _complete({**row, axis: value}, refusals, pending, without)
        if found is not None:
            return found
    return None


def _size(pending: Mapping[Values, None]) -> int:
    return len(next(iter(pending))) - 1


def _in_order(*values: tuple[str, str]) -> Values:
    order = list(AXES)
    return tuple(sorted(values, key=lambda entry: order.index(entry[0])))
