"""Features that do not go together: one table of pairs, each with its reason and what to write instead.

The checks of a run read it (`check_together`), docs/configure.md shows it, and tests/training/test_combinations.py runs
what it does not refuse. The config and the machine alone decide a pair. What a kind of data refuses because of its
records is stated with the kind (`data/encoders/kinds.py`), the limits of a model family in its own file in `models/`
(`ATTENTION_IMPLEMENTATIONS`, `tensor_parallel_plan`), and arithmetic (a batch that does not divide) is checked where it
is done. A new pair is a line of `TABLE`; a feature that several pairs have is named once, above it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from data.encoders.kind import DataKind
from data.encoders.kinds import ADDED_KINDS, OWN_KINDS, find_kind
from errors import UserError
from extension import load_parts
from models.adapters.options import AdapterName, starts_from_base
from training.config.schema import RunConfig
from training.config.sources import list_evaluations, parse_key


class Scope(Enum):
    """Who refuses a pair. A plan is made for other machines than this one, and has options of its own."""

    both = "run, plan"
    run = "run"
    plan = "plan"


@dataclass(frozen=True)
class CheckedConfig:
    """The input of a feature: a config and its machine. has_accelerator: true for a plan. has_experts: False where the
    model is known to be dense."""

    config: RunConfig
    has_accelerator: bool = True
    has_experts: bool = True

    def read(self, key: str) -> Any:
        return functools.reduce(getattr, key.split("."), self.config)


@dataclass(frozen=True)
class Feature:
    """A property that a run may have.

    words: its name in the table. key: the key whose value a message shows; empty where the words are enough. scope: who
    can have it: a property of this machine, only a run. switches: the keys that turn it on; null turns them off.
    """

    words: str
    holds: Callable[[CheckedConfig], bool]
    key: str = ""
    scope: Scope = Scope.both
    switches: tuple[str, ...] = ()

    def show(self, run: CheckedConfig) -> str:
        return f"{self.key.removesuffix('.name')}={write_value(run.read(self.key))}" if self.key else self.words


@dataclass(frozen=True)
class Pair:
    """Two features that exclude each other. reason: the text after the colon; instead: what to write or omit."""

    first: Feature
    second: Feature
    reason: str
    instead: str

    @property
    def scope(self) -> Scope:
        """Who refuses the pair: whoever can have both features."""
        return next((each.scope for each in (self.first, self.second) if each.scope is not Scope.both), Scope.both)


def write_value(value: Any) -> str:
    """Return a typed value as the command line writes it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list):
        return f"[{','.join(map(write_value, value))}]"
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)


def has_value(key: str, *values: str) -> Feature:
    """Return the feature that the key has one of these values."""
    words = f"{key.removesuffix('.name')}={' or '.join(values)}"
    return Feature(words, lambda run: write_value(run.read(key)) in values, key)


def _above(key: str, limit: int) -> Feature:
    return Feature(f"{key} > {limit}", lambda run: run.read(key) > limit, key)


def _given(key: str, words: str = "") -> Feature:
    """Return the feature that a key is set which is empty or null by default; a message names it without its value."""
    return Feature(words or key, lambda run: bool(run.read(key)))


def _set(key: str) -> Feature:
    """Return the feature that a key is set which is null by default; its value may be 0."""
    return Feature(key, lambda run: run.read(key) is not None, key)


def _kind(words: str, holds: Callable[[DataKind], bool]) -> Feature:
    return Feature(words, lambda run: holds(find_kind(run.config.data.name)), "data.name")


def _with_lora(feature: Feature) -> Feature:
    """Return the feature of a key of `adapter`, which only adapter=lora reads."""
    return replace(feature, holds=lambda run: run.config.adapter.name is AdapterName.lora and feature.holds(run))


# The machine and the kind of run
NO_GPU = Feature("a machine without a GPU", lambda run: not run.has_accelerator, scope=Scope.run)
TIMED_HERE = Feature(
    "plan=true with hardware=here",
    lambda run: run.config.plan is True and run.config.hardware.peak_flops is None,
    scope=Scope.plan,
)
EVALUATE_ONLY, OVERWRITE = has_value("evaluate_only", "true"), has_value("overwrite_output_dir", "true")
FROM_SCRATCH = has_value("init", "random")

# Layers and kernels
FP16, FP32 = has_value("precision", "fp16"), has_value("precision", "fp32")
COMPILED = has_value("compile", "true")
FLASH = has_value("attn_implementation", "flash_attention_2", "flash_attention_3")
FA3 = has_value("flash_kernels", "fa3")
CHECKPOINT_NONE = has_value("activation_checkpoint_interval", "0")
CHECKPOINT_AUTO = has_value("activation_checkpoint_interval", "auto")

# The layout
OTHER_SCHEDULE = Feature("a schedule other than 1f1b", lambda run: run.config.schedule != "1f1b", "schedule")
ONE_STAGE = Feature(  # a plan of several layouts tries other numbers of stages
    "num_stages=1", lambda run: run.config.num_stages == 1 and not run.config.varies_layout, "num_stages"
)
TENSOR_PARALLEL = _above("tensor_parallel_size", 1)
SEQUENCE_PARALLEL = has_value("sequence_parallel", "true")
CONTEXT_PARALLEL = _above("context_parallel_size", 1)
EXPERT_PARALLEL = _above("expert_parallel_size", 1)
ZERO_3 = has_value("zero_stage", "3")
GROUPED = _given("sharding_parallel_size")
OPTIMIZER_ON_HOST = has_value("offload_optimizer", "cpu")
ADAMW_8BIT = has_value("optimizer.name", "adamw_8bit")

# Adapters
LORA = has_value("adapter.name", "lora")
LORA_DROPOUT = _with_lora(_above("adapter.lora_dropout", 0))
DORA = _with_lora(has_value("adapter.use_dora", "true"))
IN_4BIT = _with_lora(has_value("adapter.load_in_4bit", "true"))
KEPT = _with_lora(has_value("adapter.keep_quantized", "true"))
NEW_ADAPTER = Feature(
    "adapter=lora without adapter.name_or_path and resume",
    lambda run: LORA.holds(run) and not run.config.adapter.name_or_path and not run.config.resume,
)
STARTS_FROM_BASE = _with_lora(
    Feature(
        "adapter.init_lora_weights=pissa or olora",
        lambda run: starts_from_base(run.config.adapter.init_lora_weights),
        "adapter.init_lora_weights",
    )
)

# Data
GROUPED_BY_LENGTH = has_value("data.group_by_length", "true")
DOCUMENTS = _kind("data=pretrain", lambda kind: kind.concatenates)
DEFINES_LOSS = _kind("data with a loss of its own", lambda kind: kind.task not in ("sft", "pretrain"))
PACKED, SPLIT = has_value("data.packing", "true"), has_value("data.length_policy", "split")
PACKED_SAMPLES = replace(PACKED, holds=lambda run: PACKED.holds(run) and not DOCUMENTS.holds(run))
STREAMED = has_value("data.streaming", "true")
MIXTURE = Feature(
    "train_file with shares",
    lambda run: not run.config.evaluate_only and parse_key(run.config, "train_file").mixture is not None,
)
COLLATOR = _given("data.collator")

# The loss
USER_LOSS = _given("loss", "loss={_target_: ...}")
FURTHER_TOKENS = _above("mtp.loss_coef", 0)
EMBEDDING_NOISE = _above("neftune_noise_alpha", 0)

# Evaluations and checkpoints
EVAL_FILE, EVAL_FRACTION, EVAL_SAMPLES = _given("eval_file"), _set("data.eval_fraction"), _set("data.eval_samples")
NO_EVALUATION = Feature("eval_file=null", lambda run: not list_evaluations(run.config), "eval_file")
EVAL_EPOCHS, SAVE_EPOCHS = _given("eval_epochs"), _given("save_epochs")
NO_CADENCE = Feature(
    "eval_steps=null and eval_epochs=null", lambda run: not (run.config.eval_steps or run.config.eval_epochs)
)


Row = tuple[Feature, dict[Feature, str]]


def _refuse_for(kinds: Sequence[DataKind]) -> list[Row]:
    """Return what these kinds of data refuse by themselves."""
    return [
        (has_value("data.name", kind.name), {feature: f"{reason}; give {instead}" for feature, reason, instead in (
            (PACKED, kind.not_packed, "data.packing=false"),
            (SPLIT, kind.not_split, "data.length_policy=truncate or drop"),
            (STREAMED, kind.not_streamed, "data.streaming=false"),
        ) if reason})
        for kind in kinds
    ]  # fmt: skip


def _untested(*features: Feature) -> dict[Feature, str]:
    """Return features whose combination with another one is refused only because nothing tests it."""
    texts = {
        COMPILED: "it is not tested with compiled layers; give compile=false",
        CONTEXT_PARALLEL: "it is not tested with split sequences; give context_parallel_size=1",
        EXPERT_PARALLEL: "it is not tested with divided experts; give expert_parallel_size=1",
        ZERO_3: "it is not tested with sharded weights; give zero_stage=1 or 2",
    }
    return {feature: texts[feature] for feature in features}


# (feature, {feature that it does not go together with: "reason; what to write instead"}). A run that has several pairs
# is refused by the first one, so their order counts.
TABLE: tuple[Row, ...] = (
    # Layers and kernels
    (FP16, {NO_GPU: "DeepSpeed refuses it on a CPU; use precision=bf16 or fp32"}),
    (FLASH, {
        NO_GPU: "its kernels need CUDA; use attn_implementation=sdpa",
        FP32: "its kernels take bf16 and fp16; use precision=bf16, or attn_implementation=sdpa",
    }),
    (has_value("attn_implementation", "flex_attention"), {
        NO_GPU: "it has no backward pass on a CPU; use attn_implementation=sdpa"}),
    (FA3, {
        NO_GPU: "its kernels need CUDA; give flash_kernels=torch",
        FP32: "its kernels take bf16 and fp16; use precision=bf16, or flash_kernels=torch",
        has_value("attn_implementation", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"):
            "it replaces the kernels of sdpa, varlen and rings; give flash_kernels=torch, or attn_implementation=auto",
    }),
    (has_value("fused_kernels", "auto"), {COMPILED:
        "the compiler fuses the same operations; give fused_kernels=none, or compile=false"}),
    (has_value("activation_checkpoint_mode", "every", "selective"), {
        CHECKPOINT_NONE: "nothing is recomputed then; "
            "give activation_checkpoint_interval=1 or more, or activation_checkpoint_mode=grouped",
        CHECKPOINT_AUTO: "it chooses the mode too; "
            "give an activation_checkpoint_interval of 1 or more, or omit activation_checkpoint_mode",
    }),
    (has_value("activation_offload", "true"), {
        CHECKPOINT_NONE: "it moves the inputs of recomputed groups of layers; "
            "give activation_checkpoint_interval=1 or more, or activation_offload=false",
        COMPILED: "it is not tested with compiled layers; give compile=false, or activation_offload=false",
    }),

    # The layout
    (OTHER_SCHEDULE, {ONE_STAGE:
        "it fills the bubble of a pipeline, and one stage has none; give num_stages=2 or more, or schedule=1f1b"}),
    (has_value("schedule", "zero_bubble"), {COMPILED:
        "the compiler turns a backward pass into a single function; give schedule=interleaved, or compile=false"}),
    (TENSOR_PARALLEL, {
        FP16: "loss scaling is not tested with tensor parallelism; give tensor_parallel_size=1",
        COMPILED: "the sums between ranks inside a layer are not compiled; give tensor_parallel_size=1",
        USER_LOSS: "it would see only a part of the vocabulary; give tensor_parallel_size=1",
        LORA_DROPOUT: "the ranks of a layer would drop different inputs; "
            "give adapter.lora_dropout=0, or tensor_parallel_size=1",
        DORA: "its magnitudes are norms of whole rows of a weight; give tensor_parallel_size=1",
        STARTS_FROM_BASE: "they are decompositions of whole weights; "
            "give adapter.init_lora_weights=true, or tensor_parallel_size=1",
        IN_4BIT: "quantized weights are not sharded; give tensor_parallel_size=1",
        KEPT: "quantized weights are not sharded; give tensor_parallel_size=1",
        TIMED_HERE: "it times whole layers; choose other hardware",
    }),
    (SEQUENCE_PARALLEL, {has_value("tensor_parallel_size", "1"):
        "the ranks of a tensor parallel group hold parts of sequences; "
        "give tensor_parallel_size=2 or more, or sequence_parallel=false"}),
    (has_value("context_parallel_mode", "ulysses", "ring"), {has_value("context_parallel_size", "1"):
        "sequences are not split then; give context_parallel_size=2 or more, or context_parallel_mode=auto"}),
    (CONTEXT_PARALLEL, {
        TIMED_HERE: "it times layers with whole sequences; choose other hardware",
        USER_LOSS: "it would see only a part of each sequence; give context_parallel_size=1",
        has_value("attn_implementation", "flash_attention_2", "flash_attention_3", "flex_attention"):
            "the exchange of heads is tested with sdpa, varlen and eager only; use attn_implementation=auto",
        COMPILED: "the exchanges between ranks inside a layer are not compiled; give context_parallel_size=1",
        FP16: "loss scaling is not tested with split sequences; give context_parallel_size=1",
    }),
    (EXPERT_PARALLEL, {
        TIMED_HERE: "it times layers with all experts; choose other hardware",
        COMPILED: "the exchanges between ranks inside a layer are not compiled; give expert_parallel_size=1",
        FP16: "loss scaling is not tested with divided experts; give expert_parallel_size=1",
        ZERO_3: "its weights are gathered from all replicas, which have different experts; "
            "give zero_stage=1 or 2, or expert_parallel_size=1",
        GROUPED: "experts are partitioned over the replicas that have the same ones; "
            "give sharding_parallel_size=null, or expert_parallel_size=1",
    }),
    (ADAMW_8BIT, {OPTIMIZER_ON_HOST: "the update of bitsandbytes is about 40 times slower on a host; "
        "give optimizer=adamw optimizer.state_dtype=bf16, or offload_optimizer=none"}),
    (ZERO_3, {
        _above("num_stages", 1):
            "each pass of a stage needs whole weights, which would cross the network once per micro-batch; "
            "give zero_stage=1 or 2, or num_stages=1",
        TENSOR_PARALLEL: "it is not tested with tensor parallelism; give zero_stage=1 or 2, or tensor_parallel_size=1",
        FP16: "loss scaling is not tested with it; use precision=bf16, or zero_stage=1 or 2",
    }),
    (has_value("zero_stage", "2", "3"), {COMPILED:
        "it is not tested with compiled layers; give compile=false, or zero_stage=1"}),
    (ZERO_3, {
        OPTIMIZER_ON_HOST: "it is not tested with optimizer state on the host; "
            "give offload_optimizer=none, or zero_stage=1 or 2",
        ADAMW_8BIT: "blockwise state is not tested with it; "
            "give optimizer.state_dtype=bf16 with adamw, or zero_stage=1 or 2",
        IN_4BIT: "it is not tested with quantized weights; give zero_stage=1 or 2",
        KEPT: "it is not tested with quantized weights; give zero_stage=1 or 2",
        DORA: "its magnitudes are norms of whole weights, which only the layer that holds them gathers; "
            "give zero_stage=1 or 2",
    }),
    (GROUPED, {
        ZERO_3: "its weights are gathered from all replicas; give zero_stage=1 or 2, or sharding_parallel_size=null",
        FP16: "loss scaling is not tested with it; use precision=bf16, or sharding_parallel_size=null",
    }),
    (has_value("offload_parameters", "cpu"), {has_value("zero_stage", "1", "2"):
        "each pass needs whole weights, which are on the GPU then; give zero_stage=3, or offload_parameters=none"}),
    (ZERO_3, {EVALUATE_ONLY: "weights are sharded only where they are trained; "
        "give zero_stage=1, with num_stages or tensor_parallel_size for a model that is too large for one GPU"}),

    # What is trained
    (KEPT, {
        IN_4BIT: "the experts have one form; give adapter.load_in_4bit=false, or adapter.keep_quantized=false",
        TIMED_HERE: "it has no weights in that form; choose other hardware",
    }),
    (_given("freeze"), {LORA:
        "an adapter freezes everything else; choose what is trained with adapter.target_modules"}),
    (_above("moe.update_router_bias", 0), {LORA:
        "only the adapter is saved, and the bias is not part of it; give moe.update_router_bias=0"}),

    # Data
    (DOCUMENTS, {
        has_value("data.packing", "false"): "documents are laid end to end; omit data.packing, or use data=sft",
        has_value("data.length_policy", "truncate", "drop"):
            "documents are cut where a row is full; omit data.length_policy, or use data=sft",
        GROUPED_BY_LENGTH: "rows of documents that are laid end to end have one length; "
            "omit data.group_by_length, or use data=sft",
    }),
    (_given("data.chat_template"), {DOCUMENTS:
        "raw text holds no messages; give data=chat, or data.special_tokens to add tokens only"}),
    *_refuse_for(OWN_KINDS),
    (GROUPED_BY_LENGTH, {
        PACKED_SAMPLES: "packed rows have like lengths; give one of them",
        has_value("data.pad_to", "max_seq_length"): "all rows have one length then; give one of them",
        STREAMED: "the lengths of a stream are not known beforehand; give one of them",
    }),
    (STREAMED, {
        has_value("max_steps", "null"): "a stream has no epochs of a known length; give max_steps",
        EVAL_EPOCHS: "a stream has no epochs of a known length; give eval_steps",
        SAVE_EPOCHS: "a stream has no epochs of a known length; give save_steps",
        MIXTURE: "its shares are those of whole files; give paths without weight and epochs, or data.streaming=false",
        **dict.fromkeys((EVAL_FRACTION, EVAL_SAMPLES),
            "it takes all records, which a stream never has at once; give eval_file, or data.streaming=false"),
        _set("data.max_samples"): "a stream ends at max_steps; give data.streaming=false for a first try",
    }),

    # The loss
    (FURTHER_TOKENS, {
        USER_LOSS: "it would see the hidden states of one depth; give one of them",
        SEQUENCE_PARALLEL: "the hidden states of several depths are not split by tokens; give sequence_parallel=false",
        **_untested(COMPILED, CONTEXT_PARALLEL, EXPERT_PARALLEL, ZERO_3),
        EMBEDDING_NOISE: "the noise is that of the inputs, and further tokens use the embedding too; "
            "give neftune_noise_alpha=0, or mtp.loss_coef=0",
        COLLATOR: "which targets further tokens have is counted in rows as they are stored; "
            "omit data.collator, or give mtp.loss_coef=0",
    }),
    (_above("label_smoothing", 0), {USER_LOSS: "it smooths the cross entropy; give one of them"}),
    (DEFINES_LOSS, {USER_LOSS: "each of them defines the loss; give one of them"}),
    (_set("warmup_steps"), {_set("warmup_ratio"):
        "each is the length of the warm-up; give one of them, and null for the other"}),

    # The start, evaluations and checkpoints
    (FROM_SCRATCH, {
        Feature("model=from_checkpoint", lambda run: not run.config.model):
            "nothing states the architecture; choose one of conf/model, such as model=llama_7b",
        has_value("tokenizer_name_or_path", "null"):
            "there is no model folder to load the tokenizer from; give tokenizer_name_or_path",
        LORA: "it needs pretrained weights; give one of them",
        EVALUATE_ONLY: "it needs pretrained weights; give one of them",
    }),
    (EVAL_FRACTION, {
        EVAL_FILE: "each of them is what is evaluated; give eval_file=null, or omit data.eval_fraction",
        EVAL_SAMPLES: "each says how much is held out; give one of them",
    }),
    (EVAL_SAMPLES, {EVAL_FILE: "each of them is what is evaluated; give eval_file=null, or omit data.eval_samples"}),
    (EVALUATE_ONLY, {
        NO_EVALUATION: "there is nothing to evaluate; give eval_file",
        _given("callbacks"): "they are called while a run trains; give one of them",
        OVERWRITE: "it writes no checkpoint, and the existing ones would be deleted; give one of them",
        NEW_ADAPTER: "a new adapter adds nothing to the model; "
            "give resume or adapter.name_or_path, or adapter=none for the model alone",
    }),
    (_given("resume"), {OVERWRITE: "one continues a run, the other restarts it; give one of them"}),
    (_given("eval_steps"), {EVAL_EPOCHS: "both set the interval; give one of them"}),
    (_given("save_steps"), {SAVE_EPOCHS: "both set the interval; give one of them"}),
    (_given("keep_best"), {
        has_value("keep_last", "null"): "all checkpoints are kept then; give keep_last too, or keep_best=null",
        NO_EVALUATION: "there is no evaluation to compare; give eval_file too, or keep_best=null",
    }),
    (has_value("load_best_model_at_end", "true"), {NO_EVALUATION:
        "there is no evaluation to compare; give eval_file too, or load_best_model_at_end=false"}),
    (_given("early_stopping_patience"), {
        NO_EVALUATION: "there is no evaluation that could improve; give eval_file too, or early_stopping_patience=null",
        NO_CADENCE: "the run is evaluated only at its end; give one of them",
    }),
)  # fmt: skip


def read_pairs(rows: Sequence[Row]) -> tuple[Pair, ...]:
    """Return the pairs of rows of the table."""
    return tuple(Pair(first, second, *text.split("; ")) for first, others in rows for second, text in others.items())


INCOMPATIBLE = read_pairs(TABLE)


@functools.cache
def _list_added() -> tuple[Pair, ...]:
    """Return the pairs that extensions add."""
    return read_pairs([*_refuse_for(ADDED_KINDS), *load_parts("refusals")])


def list_pairs() -> tuple[Pair, ...]:
    """Return the pairs of the table, then those of extensions."""
    return (*INCOMPATIBLE, *_list_added())


def list_conflicts(run: CheckedConfig) -> list[Pair]:
    """Return the pairs of the table, and of extensions, of which this run has both features."""
    return [pair for pair in list_pairs() if pair.first.holds(run) and pair.second.holds(run)]


def check_together(run: CheckedConfig) -> None:
    """Raise UserError for the first pair of features of the run that do not go together."""
    for pair in list_conflicts(run):
        raise UserError(
            f"{pair.first.show(run)} does not go together with {pair.second.show(run)}: {pair.reason}; {pair.instead}"
        )


def render_table() -> str:
    """Return the table in Markdown, as docs/configure.md shows it."""
    rows = [
        f"| `{pair.first.words}` | {_mark(pair.second)} | {pair.reason} | {pair.instead} | {pair.scope.value} |"
        for pair in INCOMPATIBLE
    ]
    header = ["| this | and this | why not | instead | refused by |", "|---|---|---|---|---|"]
    return "\n".join([*header, *rows]) + "\n"


def _mark(feature: Feature) -> str:
    return feature.words if feature is NO_GPU else f"`{feature.words}`"
