"""The schema of a run. Hydra fills it from `conf/`, and from here on only typed objects travel.

Names are those of DeepSpeed, Megatron and Hugging Face. Scalars of the run are top-level keys; a group holds only what
differs between its options. Every key is described once, in `conf/base.yaml`; a number states its range here
(`ranges.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from data.options import (
    ControlTokens,
    LengthPolicy,
    MixtureUnit,
    OnBadRecord,
    PadTo,
    ProblemType,
    RewrittenTurns,
    TrainOn,
)
from errors import UserError
from extension import OWN_FOLDERS, list_actions, list_conf_folders, load_extensions, load_part
from masking import remember_secrets
from models.adapters.options import AdapterOptions
from training.config.ranges import (
    at_least,
    below,
    between,
    count_or_counts,
    fraction,
    one_of,
    positive,
    share,
    whole_or,
    zero_or_more,
)

Schema = TypeVar("Schema")
CONF = Path(__file__).resolve().parents[2] / "conf"
AUTO = "auto"  # of activation_checkpoint_interval
NOT_GIVEN = "(not given)"  # the value of a key without a default in a run that does not read it


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ReduceDtype(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class Offload(Enum):
    none = "none"
    cpu = "cpu"


class SchedulerType(Enum):
    cosine = "cosine"
    cosine_with_restarts = "cosine_with_restarts"
    linear = "linear"
    polynomial = "polynomial"
    constant = "constant"
    wsd = "wsd"


class DecayType(Enum):
    linear = "linear"
    cosine = "cosine"
    sqrt = "sqrt"


class CheckpointMode(Enum):
    grouped = "grouped"
    every = "every"
    selective = "selective"


class AttnImplementation(Enum):
    auto = "auto"
    sdpa = "sdpa"
    varlen = "varlen"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"
    flash_attention_3 = "flash_attention_3"
    flex_attention = "flex_attention"


class ContextParallelMode(Enum):
    auto = "auto"
    ulysses = "ulysses"
    ring = "ring"


class FlashKernels(Enum):
    torch = "torch"
    fa3 = "fa3"


class FusedKernels(Enum):
    none = "none"
    auto = "auto"


class RouterDtype(Enum):
    fp32 = "fp32"


class Init(Enum):
    pretrained = "pretrained"
    random = "random"


class OnNonfinite(Enum):
    stop = "stop"
    skip = "skip"


class StateDtype(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class OptimizerName(Enum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    lion = "lion"
    sgd = "sgd"
    custom = "custom"


class TrackerMode(Enum):
    online = "online"
    offline = "offline"


class Device(Enum):
    cuda = "cuda"
    cpu = "cpu"


@dataclass
class DataConfig:
    name: str = MISSING
    encoder: Any = MISSING
    collator: Any = MISSING
    prompt_field: str | None = MISSING
    completion_field: str | None = MISSING
    messages_field: str | None = MISSING
    prompt_template: str | None = MISSING
    text_field: str | None = MISSING
    response_marker: str | None = MISSING
    label_field: str | None = MISSING
    problem_type: ProblemType = MISSING
    labels: list[str] | None = MISSING
    train_on: TrainOn = MISSING
    rewritten_turns: RewrittenTurns = MISSING
    template_kwargs: Any = MISSING  # a mapping; built by training/inputs/datasets.py
    train_on_reasoning: bool = MISSING
    control_tokens: ControlTokens | None = MISSING
    chat_template: str | None = MISSING
    special_tokens: list[str] = MISSING
    eos_token: str | None = MISSING
    packing: bool = MISSING
    length_policy: LengthPolicy = MISSING
    on_bad_record: OnBadRecord = MISSING
    mixture_by: MixtureUnit = MISSING
    max_samples: int | None = at_least(1)
    filter: Any = MISSING
    eval_fraction: float | None = between(0, 1)
    eval_samples: int | None = at_least(1)
    pad_to: PadTo = MISSING
    group_by_length: bool = MISSING
    streaming: bool = MISSING
    shuffle_block: int = at_least(1)
    cache_dir: str = MISSING
    num_proc: int = at_least(1)

    @property
    def holds_out(self) -> bool:
        """Whether a part of train_file is held out and evaluated."""
        return self.eval_fraction is not None or self.eval_samples is not None


@dataclass
class RopeConfig:
    rope_type: str | None = MISSING  # checked by models/layers/rope_scaling.py
    factor: float | None = MISSING
    rope_theta: float | None = MISSING
    original_max_position_embeddings: int | None = MISSING
    low_freq_factor: float | None = MISSING
    high_freq_factor: float | None = MISSING
    beta_fast: float | None = MISSING
    beta_slow: float | None = MISSING
    attention_factor: float | None = MISSING
    mscale: float | None = MISSING
    mscale_all_dim: float | None = MISSING
    truncate: bool | None = MISSING

    def list_given(self) -> dict[str, Any]:
        """As a Hugging Face config.json has them; empty where the model's own stay."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}


@dataclass
class MoEConfig:
    aux_loss_coef: float = zero_or_more(note="0 turns it off")
    z_loss_coef: float = zero_or_more(note="0 turns it off")
    update_router_bias: float = zero_or_more(note="0 turns it off")
    router_dtype: RouterDtype | None = None
    imbalance: float = at_least(1)

    @property
    def shapes_routers(self) -> bool:
        """Whether a run trains its routers for balance, by a loss or a bias."""
        return any((self.aux_loss_coef, self.z_loss_coef, self.update_router_bias))


@dataclass
class MTPConfig:
    loss_coef: float = zero_or_more(note="0 turns it off")


@dataclass
class SchedulerConfig:
    power: float | None = positive()
    num_cycles: int | None = at_least(1)
    decay_ratio: float | None = share()
    decay_type: DecayType | None = MISSING


@dataclass
class OptimizerConfig:
    name: OptimizerName = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = positive(default=1e-8)
    state_dtype: StateDtype = StateDtype.fp32
    custom: Any = None

    @property
    def rounds_state(self) -> bool:
        """Whether AdamW's moment estimates are kept in bf16."""
        return self.name is OptimizerName.adamw and self.state_dtype is StateDtype.bf16


@dataclass
class ParameterGroup:
    pattern: str = MISSING
    learning_rate: float | None = None
    weight_decay: float | None = None


@dataclass
class LoggerConfig:
    trackers: dict[str, Any] = field(default_factory=dict)
    project: str = "llm-pipeline"
    run_name: str | None = None
    mode: TrackerMode = TrackerMode.online


@dataclass
class HardwareConfig:
    """The description of a machine for the plan. GiB, GB/s and FLOP/s; null is measured on the spot
    (`hardware=here`), but a price and the multiprocessors."""

    name: str = MISSING
    device: Device = MISSING
    cards_per_node: int | None = at_least(1)
    memory: float | None = positive()
    usable_memory: float = fraction()
    peak_flops: dict[str, float] | None = positive()  # noqa: RUF009 (a field, as those around it)
    efficiency: float = fraction()
    multiprocessors: int | None = at_least(1)
    flash_attention_2: float = zero_or_more(default=1.0)
    memory_bandwidth: float | None = positive()
    intra_node_bandwidth: float | None = positive()
    switched: bool = True
    inter_node_bandwidth: float | None = positive()
    host_memory: float | None = positive()
    host_memory_bandwidth: float | None = positive()
    host_link_bandwidth: float | None = positive()
    price_per_hour: float | None = positive()
    device_name: str = MISSING


@dataclass
class RunConfig:
    """One run. The defaults live in `conf/base.yaml`."""

    model: dict[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adapter: AdapterOptions = field(default_factory=AdapterOptions)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    model_name_or_path: str = MISSING
    init: Init = MISSING
    rope_parameters: RopeConfig = field(default_factory=RopeConfig)
    tokenizer_name_or_path: str | None = MISSING
    trust_remote_code: bool = MISSING
    train_file: Any = MISSING
    eval_file: Any = MISSING
    output_dir: str = MISSING
    overwrite_output_dir: bool = MISSING
    resume: str | None = MISSING
    resume_allow_changes: bool = MISSING
    trust_checkpoint: bool = MISSING
    evaluate_only: bool = MISSING

    freeze: list[str] = MISSING

    task: str | None = MISSING

    moe: MoEConfig = field(default_factory=MoEConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)

    num_stages: int = MISSING
    tensor_parallel_size: int = at_least(1)
    sequence_parallel: bool = MISSING
    context_parallel_size: int = at_least(1)
    context_parallel_mode: ContextParallelMode = MISSING
    expert_parallel_size: int = at_least(1)
    zero_stage: int = one_of(1, 2, 3, note="1 partitions the optimizer's state, 2 the gradients too, 3 the weights too")
    sharding_parallel_size: int | None = at_least(1, note="null: all replicas")
    partition_method: Any = MISSING
    schedule: str = MISSING  # a name in SCHEDULES of training/pipeline/schedules.py, which checks it
    virtual_stages_per_rank: int = at_least(2, note="with one chunk of layers per rank it is schedule=1f1b")
    schedule_memory_limit: int | None = at_least(1, note="null derives it from num_stages")
    micro_batch_size: int | None = MISSING
    gradient_accumulation_steps: int | None = MISSING
    global_batch_size: int | None = MISSING
    max_seq_length: int = at_least(1)
    num_workers: int = zero_or_more()
    seed: int = MISSING

    loss: Any = MISSING
    label_smoothing: float = below(1, note="at 1 no target would be left")
    neftune_noise_alpha: float = zero_or_more()
    learning_rate: float = zero_or_more()
    lr_scheduler_type: SchedulerType = MISSING
    lr_scheduler_kwargs: SchedulerConfig = field(default_factory=SchedulerConfig)
    min_lr_ratio: float = share()
    warmup_ratio: float | None = share()
    warmup_steps: int | None = zero_or_more()
    weight_decay: float = zero_or_more()
    parameter_groups: list[ParameterGroup] = MISSING
    max_grad_norm: float = zero_or_more()
    on_nonfinite: OnNonfinite = MISSING
    num_train_epochs: float = positive()
    max_steps: int | None = at_least(1)
    stop_after_steps: int | None = at_least(1)
    skip_data_intervals: list[list[int]] = MISSING

    callbacks: list[Any] = MISSING
    logging_steps: int = at_least(1)
    profile_step: int | None = at_least(1, note="null turns it off")
    profile_trace: int | None = at_least(1, note="null turns it off")
    eval_steps: int | None = at_least(1, note="null turns it off")
    eval_epochs: float | None = positive()
    eval_on_start: bool = MISSING
    eval_token_accuracy: bool = MISSING
    save_steps: int | None = at_least(1, note="null turns it off")
    save_epochs: float | None = positive()
    save_minutes: float | None = positive()
    save_weights_only: bool = MISSING
    save_final: bool = MISSING
    export_steps: list[int] = field(default_factory=list)
    export_unused: bool = MISSING
    async_save: bool = MISSING
    keep_last: int | None = at_least(1)
    keep_best: int | None = at_least(1)
    metric_for_best_model: str = MISSING
    greater_is_better: bool | None = MISSING
    load_best_model_at_end: bool = MISSING
    early_stopping_patience: int | None = at_least(1)
    early_stopping_threshold: float = zero_or_more()
    grace_seconds: float = positive()
    stuck_minutes: float | None = positive()
    start_minutes: float | None = positive()

    precision: Precision = MISSING
    gradient_reduce_dtype: ReduceDtype = MISSING
    offload_optimizer: Offload = MISSING
    offload_parameters: Offload = MISSING
    activation_checkpoint_interval: Any = whole_or(AUTO)  # noqa: RUF009  # a field, as the other ranges
    activation_checkpoint_mode: CheckpointMode = MISSING
    activation_offload: bool = MISSING
    compile: bool = MISSING
    attn_implementation: AttnImplementation = MISSING
    flash_kernels: FlashKernels = MISSING
    fused_kernels: FusedKernels = MISSING

    plan: Any = MISSING
    world_size: Any = count_or_counts()  # noqa: RUF009  # a field, as the other ranges

    def read_group(self, kind: type[Schema]) -> Schema:
        """Return the keys that an extension has added. kind: their dataclass."""
        return next(value for value in vars(self).values() if isinstance(value, kind))

    @property
    def varies_layout(self) -> bool:
        """Whether the config is that of a plan over several layouts, whose keys it chooses itself."""
        return isinstance(self.plan, str)

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that have a part of every sequence between the blocks of a layer."""
        return self.tensor_parallel_size if self.sequence_parallel else 1

    @property
    def shards_gradients(self) -> bool:
        """Whether each replica holds a part of the gradients, which are then reduced in every backward pass."""
        return self.zero_stage >= 2

    @property
    def shards_weights(self) -> bool:
        """Whether each replica holds a part of the weights."""
        return self.zero_stage == 3

    @property
    def shards_gradients_only(self) -> bool:
        """Whether gradients are sharded and weights whole: by `training/engine/gradient_sums.py`, not by DeepSpeed."""
        return self.shards_gradients and not self.shards_weights

    @property
    def sums_in_fp32(self) -> bool:
        """Whether gradients of weights in bf16 are summed over the micro-batches in fp32, whole, so that what computes
        them can add to the sums itself."""
        return self.precision is Precision.bf16 and not self.shards_gradients


@cache
def build_schema() -> type[RunConfig]:
    """Return the class of a run's config: `RunConfig` with the groups of keys that extensions add, and with their keys
    in its own groups."""
    added: dict[str, list[type]] = {}
    for extension in load_extensions():
        for name, place in extension.keys.items():
            added.setdefault(name, []).append(load_part(place))
    own = get_type_hints(RunConfig)
    for name in sorted(list_actions().keys() & own.keys()):
        raise UserError(f"{OWN_FOLDERS}: an extension adds the key {name}, which the project has; give it another name")
    for name, parts in added.items():
        if name not in own and len(parts) > 1:
            raise UserError(f"{OWN_FOLDERS}: two extensions add the key {name}; give one of them another name")
    groups = {name: _extend_group(name, own[name], parts) for name, parts in added.items() if name in own}
    groups |= {name: parts[0] for name, parts in added.items() if name not in own}
    actions = [(name, bool, field(default=False)) for name in list_actions()]
    return _make("ExtendedConfig", (RunConfig,), groups, actions)


def _extend_group(name: str, group: Any, parts: Sequence[type]) -> type:
    """Return a group of the project with the keys that extensions add to it."""
    if not (isinstance(group, type) and is_dataclass(group)):
        raise UserError(f"{OWN_FOLDERS}: an extension adds the key {name}, which the project has; give it another name")
    taken = {each.name for each in fields(group)}
    for part in parts:
        names = {each.name for each in fields(part)}
        for each in sorted(taken & names):
            raise UserError(f"{OWN_FOLDERS}: an extension adds the key {name}.{each}, which there is already")
        taken |= names
    return _make(f"Extended{group.__name__}", (*reversed(parts), group), {})


def _make(name: str, bases: tuple[Any, ...], groups: Mapping[str, type], actions: Sequence[Any] = ()) -> type:
    added = [(key, group, field(default_factory=group)) for key, group in groups.items()]
    made = make_dataclass(name, [*added, *actions], bases=bases)
    made.__module__ = __name__
    return made


def __getattr__(name: str) -> type:
    """Find the class of a config, or of a group in it, that another process has pickled."""
    if name == "ExtendedConfig":
        return build_schema()
    if name.startswith("Extended"):
        groups = get_type_hints(build_schema()).values()
        return next(group for group in groups if getattr(group, "__name__", "") == name)
    raise AttributeError(name)


def register_schema() -> None:
    """Make `run_schema` known to Hydra, from which `conf/base.yaml` starts, and the configs of extensions. Raises
    UserError as `load_extensions` does."""
    ConfigStore.instance().store(name="run_schema", node=build_schema())
    if list_conf_folders():
        Plugins.instance().register(_ExtensionsOnPath)


class _ExtensionsOnPath(SearchPathPlugin):
    """Lets Hydra search the configs of extensions, whatever `-cn` and `--config-dir` say."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in list_conf_folders():
            search_path.append("extensions", f"file://{folder}")


def find_choice(group: str, choice: str) -> Path | None:
    """Return the file of a choice of a config group, in `conf/` or in an extension's; None if there is none."""
    files = (folder / group / f"{choice}.yaml" for folder in (CONF, *list_conf_folders()))
    return next((file for file in files if file.is_file()), None)


def load_hardware() -> list[HardwareConfig]:
    """All machines of `conf/hardware/`."""
    files = sorted((CONF / "hardware").glob("*.yaml"))
    return [
        _to_object(OmegaConf.merge(OmegaConf.structured(HardwareConfig), OmegaConf.load(file)), HardwareConfig)
        for file in files
    ]


@cache  # a search of layouts asks for each candidate
def load_defaults() -> RunConfig:
    """Return a run in which each key has its default: that of `conf/base.yaml`, or of the choice it makes for a group.
    A key without one is NOT_GIVEN. It is one object, not to be changed."""
    composed = _load_defaults().copy()
    composed.update({group: _load_choice(group, choice) for group, choice in _list_choices().items()})
    return to_typed(composed, [key for key in map(str, composed) if OmegaConf.is_missing(composed, key)])


def find_default(config: RunConfig, key: str) -> Any:
    """Return the default of a key, by its dotted name: that of conf/base.yaml, or of the choice of its group. A choice
    that has no file, such as a kind of data that a user's code has added, has the defaults of the usual one."""
    group = key.partition(".")[0]
    chosen = getattr(getattr(config, group), "name", "") if (CONF / group).is_dir() else ""
    choice = str(getattr(chosen, "value", chosen))
    has_file = not choice or find_choice(group, choice) is not None
    return _find_default(key, choice if has_file else _list_choices()[group])


@cache
def _find_default(key: str, choice: str) -> Any:
    group, _, rest = key.partition(".")
    found = OmegaConf.select(_load_choice(group, choice), rest) if choice else OmegaConf.select(_load_defaults(), key)
    return OmegaConf.to_object(found) if OmegaConf.is_config(found) else found


@cache
def _load_defaults() -> DictConfig:
    """Return a config with the defaults of conf/base.yaml."""
    base = OmegaConf.masked_copy(_load_base(), [field.name for field in fields(RunConfig)])
    merged = OmegaConf.merge(OmegaConf.structured(build_schema()), base)
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _list_choices() -> dict[str, str]:
    """Return the choice that conf/base.yaml makes for each group."""
    entries = [entry for entry in _load_base()["defaults"] if isinstance(entry, DictConfig)]
    return {str(group): choice for entry in entries for group, choice in entry.items()}


@cache
def _load_choice(group: str, choice: str) -> DictConfig:
    """Return the defaults of a group whose `name` is `choice`."""
    file = find_choice(group, choice)
    assert file is not None
    chosen = OmegaConf.load(file)
    assert isinstance(chosen, DictConfig)
    shared = [name.partition("@")[0] for name in chosen.pop("defaults", [])]  # such as shared/every_kind@_here_
    places = [find_choice(group, name) for name in shared if name != "_self_"]
    files = [OmegaConf.load(place) for place in places if place is not None]
    schema = get_type_hints(build_schema())[group]
    typed = OmegaConf.structured(schema) if is_dataclass(schema) else OmegaConf.create()  # of other projects' keys
    merged = OmegaConf.merge(typed, *files, chosen)
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _load_base() -> DictConfig:
    loaded = OmegaConf.load(CONF / "base.yaml")
    assert isinstance(loaded, DictConfig)
    return loaded


def _to_object(node: Any, schema: type[Schema]) -> Schema:
    made = OmegaConf.to_object(node)
    assert isinstance(made, schema)
    return made


def find_output_dir(composed: DictConfig) -> str | None:
    """Return `output_dir` of a config that may have mistakes; None where it names none."""
    found = OmegaConf.select(composed, "output_dir", throw_on_resolution_failure=False, throw_on_missing=False)
    return found or None


def is_training(composed: DictConfig) -> bool:
    """Return whether a config that may have mistakes is that of a run which trains: not of an evaluation, of a plan, or
    of what an extension runs in its place."""
    keys = ("evaluate_only", "plan", *list_actions())
    return not any(
        OmegaConf.select(composed, key, throw_on_resolution_failure=False, throw_on_missing=False) for key in keys
    )


def to_typed(composed: DictConfig, unread: Sequence[str] = ()) -> RunConfig:
    """Typed objects, once. A key of `unread` without a value becomes NOT_GIVEN.

    Raises UserError for another key without a value, for one added with `+` that nothing reads, for an empty
    `output_dir`, which would be the working directory, and for two keys that run something in place of training.
    """
    for key in unread:
        if OmegaConf.is_missing(composed, key):
            composed[key] = NOT_GIVEN
    try:
        config = _to_object(composed, build_schema())
    except OmegaConfBaseException as error:
        if isinstance(error, MissingMandatoryValue):
            raise UserError(
                f"{error.full_key} is not given; write {error.full_key}=... on the command line, "
                "or in a config that -cn NAME picks"
            ) from None
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]} (conf/base.yaml lists the keys)") from None
    if not config.output_dir.strip():
        raise UserError("output_dir= is empty; give a folder of the run's own, such as output_dir=outputs/my_run")
    remember_secrets(OmegaConf.to_container(composed, resolve=True))
    asked = [f"{key}=true" for key in list_actions() if getattr(config, key)]
    asked += [f"plan={str(config.plan).lower()}"] if config.plan is not False else []
    if len(asked) > 1:
        raise UserError(f"{asked[0]} and {asked[1]}: each runs in place of training; give one of them")
    if config.plan is not False and config.evaluate_only:
        raise UserError(f"{asked[0]} and evaluate_only=true: a plan is of a run that trains; give evaluate_only=false")
    return config
