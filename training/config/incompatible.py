"""Features that do not go together: one table of pairs, each with its reason and what to write instead.

The checks of a run read it (`check_together`), docs/configure.md shows it, and tests/training/test_combinations.py runs
what it does not refuse. The config and the machine alone decide a pair. The limits of a model family are in its own
file in `models/` (`ATTENTION_IMPLEMENTATIONS`, `tensor_parallel_plan`), and arithmetic (a batch that does not divide)
is checked where it is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from data.encoders.kinds import find_keys, find_kind
from errors import UserError
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


def _is(key: str, *values: str) -> Feature:
    """Return the feature that the key has one of these values."""
    words = f"{key.removesuffix('.name')}={' or '.join(values)}"
    return Feature(words, lambda run: write_value(run.read(key)) in values, key)


def _positive(key: str) -> Feature:
    return Feature(f"{key} > 0", lambda run: run.read(key) > 0, key)


def _given(key: str, words: str) -> Feature:
    """Return the feature that a key is set which is empty or null by default."""
    return Feature(words, lambda run: bool(run.read(key)))


def _set(key: str) -> Feature:
    """Return the feature that a key is set which is null by default; its value may be 0."""
    return Feature(key, lambda run: run.read(key) is not None, key)


def _with_lora(feature: Feature) -> Feature:
    """Return the feature of a key of `adapter`, which only adapter=lora reads."""
    return Feature(
        feature.words, lambda run: run.config.adapter.name is AdapterName.lora and feature.holds(run), feature.key
    )


_NO_GPU = Feature("a machine without a GPU", lambda run: not run.has_accelerator, scope=Scope.run)
_TENSOR_PARALLEL = Feature(
    "tensor_parallel_size > 1", lambda run: run.config.tensor_parallel_size > 1, "tensor_parallel_size"
)
_NO_TENSOR_PARALLEL = Feature(
    "tensor_parallel_size=1", lambda run: run.config.tensor_parallel_size == 1, "tensor_parallel_size"
)
_SEQUENCE_PARALLEL = _is("sequence_parallel", "true")
_CONTEXT_PARALLEL = Feature(
    "context_parallel_size > 1", lambda run: run.config.context_parallel_size > 1, "context_parallel_size"
)
_ONE_SEQUENCE = "give context_parallel_size=1"
_EXPERT_PARALLEL = Feature(
    "expert_parallel_size > 1", lambda run: run.config.expert_parallel_size > 1, "expert_parallel_size"
)
_WHOLE_EXPERTS = "give expert_parallel_size=1"
_ONE_STAGE = Feature(  # a search tries other numbers of stages
    "num_stages=1", lambda run: run.config.num_stages == 1 and run.config.plan != "search", "num_stages"
)
_TIMED_HERE = Feature(
    "plan=true with hardware=here",
    lambda run: run.config.plan is True and run.config.hardware.peak_flops is None,
    scope=Scope.plan,
)
_DPO = _is("data.name", "preference")
_UNPAIRED = _is("data.name", "unpaired_preference")
_LABELLED = Feature(
    "data=classification or token_classification",
    lambda run: "labels" in find_keys(find_kind(run.config.data.name)),
    "data.name",
)
_RETRIEVAL = Feature(
    "data=embedding or rerank",
    lambda run: "query_field" in find_keys(find_kind(run.config.data.name)),
    "data.name",
)
_NO_QUERIES = Feature(
    "data other than embedding or rerank",
    lambda run: "query_field" not in find_keys(find_kind(run.config.data.name)),
    "data.name",
)
_EMBEDDING = _is("data.name", "embedding")
_TWO_PASSES = "each text runs twice a step, and both passes must give the same vector"
_TEXTS_TOGETHER = "the texts of a query are rows of one micro-batch"
_LORA = _is("adapter.name", "lora")
_FROM_SCRATCH = _is("init", "random")
_EVALUATION = _is("evaluate_only", "true")
_DOCUMENTS = Feature("data=pretrain", lambda run: find_kind(run.config.data.name).concatenates, "data.name")
_PACKED = _is("data.packing", "true")
_MIXTURE = Feature(
    "train_file with shares",
    lambda run: not run.config.evaluate_only and parse_key(run.config, "train_file").mixture is not None,
)
_COMPILED = _is("compile", "true")
_FP16 = _is("precision", "fp16")
_FLASH = _is("attn_implementation", "flash_attention_2", "flash_attention_3")
_FA3 = _is("flash_kernels", "fa3")
_USER_LOSS = _given("loss", "loss={_target_: ...}")
_KEEP_BEST = _given("keep_best", "keep_best")
_EARLY_STOPPING = _given("early_stopping_patience", "early_stopping_patience")
_OVERWRITE = _is("overwrite_output_dir", "true")
_EVAL_FRACTION, _EVAL_SAMPLES = _set("data.eval_fraction"), _set("data.eval_samples")
_NO_EVALUATION = Feature("eval_file=null", lambda run: not list_evaluations(run.config), "eval_file")
_EVAL_FILE = _given("eval_file", "eval_file")
_STREAMED = _is("data.streaming", "true")
_WHOLE_FILE = "it takes all records, which a stream never has at once"
_NO_EPOCHS = "a stream has no epochs of a known length"
_ONE_CADENCE = "both set the interval"
_SHARDED = _is("zero_stage", "2", "3")
_WEIGHTS_SHARDED = _is("zero_stage", "3")
_GROUPED = _given("sharding_parallel_size", "sharding_parallel_size")
_TEACHER = _given("distill.teacher", "distill.teacher")
_ONLINE = _is("distill.online", "true")
_SHARED_STAGES = "teacher and student share the stages"
_NEEDS_A_MODEL = "it needs pretrained weights"
_FURTHER_TOKENS = _positive("mtp.loss_coef")

INCOMPATIBLE = (
    Pair(_FP16, _NO_GPU, "DeepSpeed refuses it on a CPU", "use precision=bf16 or fp32"),
    Pair(_FLASH, _NO_GPU, "its kernels need CUDA", "use attn_implementation=sdpa"),
    Pair(
        _is("attn_implementation", "flex_attention"),
        _NO_GPU,
        "it has no backward pass on a CPU",
        "use attn_implementation=sdpa",
    ),
    Pair(
        _FLASH,
        _is("precision", "fp32"),
        "its kernels take bf16 and fp16",
        "use precision=bf16, or attn_implementation=sdpa",
    ),
    Pair(_FA3, _NO_GPU, "its kernels need CUDA", "give flash_kernels=torch"),
    Pair(
        _FA3, _is("precision", "fp32"), "its kernels take bf16 and fp16", "use precision=bf16, or flash_kernels=torch"
    ),
    Pair(
        _FA3,
        _is("attn_implementation", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"),
        "it replaces the kernels of sdpa, varlen and rings",
        "give flash_kernels=torch, or attn_implementation=auto",
    ),
    Pair(
        _is("fused_kernels", "auto"),
        _COMPILED,
        "the compiler fuses the same operations",
        "give fused_kernels=none, or compile=false",
    ),
    Pair(
        _is("activation_checkpoint_mode", "every", "selective"),
        _is("activation_checkpoint_interval", "0"),
        "nothing is recomputed then",
        "give activation_checkpoint_interval=1 or more, or activation_checkpoint_mode=grouped",
    ),
    Pair(
        _is("activation_checkpoint_mode", "every", "selective"),
        _is("activation_checkpoint_interval", "auto"),
        "it chooses the mode too",
        "give an activation_checkpoint_interval of 1 or more, or omit activation_checkpoint_mode",
    ),
    Pair(
        _is("activation_offload", "true"),
        _is("activation_checkpoint_interval", "0"),
        "it moves the inputs of recomputed groups of layers",
        "give activation_checkpoint_interval=1 or more, or activation_offload=false",
    ),
    Pair(
        _is("activation_offload", "true"),
        _COMPILED,
        "it is not tested with compiled layers",
        "give compile=false, or activation_offload=false",
    ),
    Pair(
        Feature("a schedule other than 1f1b", lambda run: run.config.schedule != "1f1b", "schedule"),
        _ONE_STAGE,
        "it fills the bubble of a pipeline, and one stage has none",
        "give num_stages=2 or more, or schedule=1f1b",
    ),
    Pair(
        _is("schedule", "zero_bubble"),
        _COMPILED,
        "the compiler turns a backward pass into a single function",
        "give schedule=interleaved, or compile=false",
    ),
    Pair(_TENSOR_PARALLEL, _FP16, "loss scaling is not tested with tensor parallelism", "give tensor_parallel_size=1"),
    Pair(
        _TENSOR_PARALLEL,
        _COMPILED,
        "the sums between ranks inside a layer are not compiled",
        "give tensor_parallel_size=1",
    ),
    Pair(_TENSOR_PARALLEL, _USER_LOSS, "it would see only a part of the vocabulary", "give tensor_parallel_size=1"),
    Pair(
        _TENSOR_PARALLEL,
        _with_lora(_positive("adapter.lora_dropout")),
        "the ranks of a layer would drop different inputs",
        "give adapter.lora_dropout=0, or tensor_parallel_size=1",
    ),
    Pair(
        _TENSOR_PARALLEL,
        _with_lora(_is("adapter.use_dora", "true")),
        "its magnitudes are norms of whole rows of a weight",
        "give tensor_parallel_size=1",
    ),
    Pair(
        _TENSOR_PARALLEL,
        _with_lora(
            Feature(
                "adapter.init_lora_weights=pissa or olora",
                lambda run: starts_from_base(run.config.adapter.init_lora_weights),
                "adapter.init_lora_weights",
            )
        ),
        "they are decompositions of whole weights",
        "give adapter.init_lora_weights=true, or tensor_parallel_size=1",
    ),
    Pair(
        _TENSOR_PARALLEL,
        _with_lora(_is("adapter.load_in_4bit", "true")),
        "quantized projections are not sharded",
        "give tensor_parallel_size=1",
    ),
    Pair(
        _SEQUENCE_PARALLEL,
        _NO_TENSOR_PARALLEL,
        "the ranks of a tensor parallel group hold parts of sequences",
        "give tensor_parallel_size=2 or more, or sequence_parallel=false",
    ),
    Pair(_TENSOR_PARALLEL, _TIMED_HERE, "it times whole layers", "choose other hardware"),
    Pair(
        _is("context_parallel_mode", "ulysses", "ring"),
        Feature("context_parallel_size=1", lambda run: run.config.context_parallel_size == 1, "context_parallel_size"),
        "sequences are not split then",
        "give context_parallel_size=2 or more, or context_parallel_mode=auto",
    ),
    Pair(_CONTEXT_PARALLEL, _TIMED_HERE, "it times layers with whole sequences", "choose other hardware"),
    Pair(
        _CONTEXT_PARALLEL,
        _is("data.name", "token_classification"),
        "an entity may lie in the parts of two ranks",
        _ONE_SEQUENCE,
    ),
    Pair(_CONTEXT_PARALLEL, _EMBEDDING, "it is not tested with split sequences", _ONE_SEQUENCE),
    Pair(_CONTEXT_PARALLEL, _USER_LOSS, "it would see only a part of each sequence", _ONE_SEQUENCE),
    Pair(
        _CONTEXT_PARALLEL,
        _is("attn_implementation", "flash_attention_2", "flash_attention_3", "flex_attention"),
        "the exchange of heads is tested with sdpa, varlen and eager only",
        "use attn_implementation=auto",
    ),
    Pair(_CONTEXT_PARALLEL, _COMPILED, "the exchanges between ranks inside a layer are not compiled", _ONE_SEQUENCE),
    Pair(_CONTEXT_PARALLEL, _FP16, "loss scaling is not tested with split sequences", _ONE_SEQUENCE),
    Pair(_EXPERT_PARALLEL, _TIMED_HERE, "it times layers with all experts", "choose other hardware"),
    Pair(_EXPERT_PARALLEL, _COMPILED, "the exchanges between ranks inside a layer are not compiled", _WHOLE_EXPERTS),
    Pair(_EXPERT_PARALLEL, _FP16, "loss scaling is not tested with divided experts", _WHOLE_EXPERTS),
    Pair(
        _EXPERT_PARALLEL,
        _WEIGHTS_SHARDED,
        "its weights are gathered from all replicas, which have different experts",
        "give zero_stage=1 or 2, or expert_parallel_size=1",
    ),
    Pair(
        _EXPERT_PARALLEL,
        _GROUPED,
        "experts are partitioned over the replicas that have the same ones",
        "give sharding_parallel_size=null, or expert_parallel_size=1",
    ),
    Pair(
        _is("optimizer.name", "adamw_8bit"),
        _is("offload_optimizer", "cpu"),
        "the update of bitsandbytes is about 40 times slower on a host",
        "give optimizer=adamw optimizer.state_dtype=bf16, or offload_optimizer=none",
    ),
    Pair(
        _WEIGHTS_SHARDED,
        Feature("num_stages > 1", lambda run: run.config.num_stages > 1, "num_stages"),
        "each pass of a stage needs whole weights, which would cross the network once per micro-batch",
        "give zero_stage=1 or 2, or num_stages=1",
    ),
    Pair(
        _WEIGHTS_SHARDED,
        _TENSOR_PARALLEL,
        "it is not tested with tensor parallelism",
        "give zero_stage=1 or 2, or tensor_parallel_size=1",
    ),
    Pair(_WEIGHTS_SHARDED, _FP16, "loss scaling is not tested with it", "use precision=bf16, or zero_stage=1 or 2"),
    Pair(_SHARDED, _COMPILED, "it is not tested with compiled layers", "give compile=false, or zero_stage=1"),
    Pair(
        _WEIGHTS_SHARDED,
        _is("offload_optimizer", "cpu"),
        "it is not tested with optimizer state on the host",
        "give offload_optimizer=none, or zero_stage=1 or 2",
    ),
    Pair(
        _WEIGHTS_SHARDED,
        _is("optimizer.name", "adamw_8bit"),
        "blockwise state is not tested with it",
        "give optimizer.state_dtype=bf16 with adamw, or zero_stage=1 or 2",
    ),
    Pair(
        _WEIGHTS_SHARDED,
        _with_lora(_is("adapter.load_in_4bit", "true")),
        "it is not tested with quantized projections",
        "give zero_stage=1 or 2",
    ),
    Pair(
        _WEIGHTS_SHARDED,
        _with_lora(_is("adapter.use_dora", "true")),
        "its magnitudes are norms of whole weights, which only the layer that holds them gathers",
        "give zero_stage=1 or 2",
    ),
    Pair(
        _GROUPED,
        _WEIGHTS_SHARDED,
        "its weights are gathered from all replicas",
        "give zero_stage=1 or 2, or sharding_parallel_size=null",
    ),
    Pair(_GROUPED, _FP16, "loss scaling is not tested with it", "use precision=bf16, or sharding_parallel_size=null"),
    Pair(
        _GROUPED,
        Feature("plan=search", lambda run: run.config.plan == "search", scope=Scope.plan),
        "the search varies the number of replicas, and the state is sharded over all of them",
        "give plan=true, or sharding_parallel_size=null",
    ),
    Pair(
        _is("offload_parameters", "cpu"),
        _is("zero_stage", "1", "2"),
        "each pass needs whole weights, which are on the GPU then",
        "give zero_stage=3, or offload_parameters=none",
    ),
    Pair(
        _WEIGHTS_SHARDED,
        _EVALUATION,
        "weights are sharded only where they are trained",
        "give zero_stage=1, with num_stages or tensor_parallel_size for a model that is too large for one GPU",
    ),
    Pair(
        _given("freeze", "freeze"),
        _LORA,
        "an adapter freezes everything else",
        "choose what is trained with adapter.target_modules",
    ),
    Pair(
        _positive("moe.update_router_bias"),
        _LORA,
        "only the adapter is saved, and the bias is not part of it",
        "give moe.update_router_bias=0",
    ),
    Pair(
        _DOCUMENTS,
        _is("data.packing", "false"),
        "documents are laid end to end",
        "omit data.packing, or use data=sft",
    ),
    Pair(
        _DOCUMENTS,
        _is("data.length_policy", "truncate", "drop"),
        "documents are cut where a row is full",
        "omit data.length_policy, or use data=sft",
    ),
    Pair(
        _given("data.chat_template", "data.chat_template"),
        _DOCUMENTS,
        "raw text holds no messages",
        "give data=chat, or data.special_tokens to add tokens only",
    ),
    Pair(_DPO, _PACKED, "the two answers of a preference are rows of one micro-batch", "give data.packing=false"),
    Pair(
        _DPO,
        _is("data.length_policy", "split"),
        "an answer that is split cannot be preferred",
        "give data.length_policy=truncate or drop",
    ),
    Pair(_UNPAIRED, _PACKED, "a row is one answer, with a label", "give data.packing=false"),
    Pair(
        _UNPAIRED,
        _is("data.length_policy", "split"),
        "an answer that is split cannot be judged",
        "give data.length_policy=truncate or drop",
    ),
    Pair(
        _is("data.name", "classification"),
        _is("data.length_policy", "split"),
        "its label is that of the whole document",
        "give data.length_policy=truncate or drop",
    ),
    Pair(_RETRIEVAL, _PACKED, _TEXTS_TOGETHER, "give data.packing=false"),
    Pair(
        _RETRIEVAL,
        _is("data.length_policy", "split"),
        "a part of a text is not what belongs to its query",
        "give data.length_policy=truncate or drop",
    ),
    Pair(
        _is("data.name", "rerank"),
        _is("data.num_negatives", "0"),
        "a document is scored against others for its query",
        "give data.num_negatives=1 or more",
    ),
    Pair(
        _positive("data.num_negatives"),
        _NO_QUERIES,
        "its records have no negatives",
        "give data.num_negatives=0",
    ),
    Pair(_EMBEDDING, _with_lora(_positive("adapter.lora_dropout")), _TWO_PASSES, "give adapter.lora_dropout=0"),
    Pair(_EMBEDDING, _positive("neftune_noise_alpha"), _TWO_PASSES, "give neftune_noise_alpha=0"),
    Pair(
        _STREAMED,
        Feature("max_steps=null", lambda run: run.config.max_steps is None, "max_steps"),
        _NO_EPOCHS,
        "give max_steps",
    ),
    Pair(_STREAMED, _given("eval_epochs", "eval_epochs"), _NO_EPOCHS, "give eval_steps"),
    Pair(_STREAMED, _given("save_epochs", "save_epochs"), _NO_EPOCHS, "give save_steps"),
    Pair(_STREAMED, _DPO, "preferences are scored before the first step", "give data.streaming=false"),
    Pair(_STREAMED, _UNPAIRED, "preferences are scored before the first step", "give data.streaming=false"),
    Pair(_STREAMED, _RETRIEVAL, _TEXTS_TOGETHER, "give data.streaming=false"),
    Pair(
        _STREAMED,
        _LABELLED,
        "a stream is not searched for labels, and keeps none of whole texts",
        "give data.streaming=false",
    ),
    Pair(
        _STREAMED,
        _MIXTURE,
        "its shares are those of whole files",
        "give paths without weight and epochs, or data.streaming=false",
    ),
    Pair(_STREAMED, _EVAL_FRACTION, _WHOLE_FILE, "give eval_file, or data.streaming=false"),
    Pair(_STREAMED, _EVAL_SAMPLES, _WHOLE_FILE, "give eval_file, or data.streaming=false"),
    Pair(
        _STREAMED, _set("data.max_samples"), "a stream ends at max_steps", "give data.streaming=false for a first try"
    ),
    Pair(
        _STREAMED,
        _is("inspect_data", "true"),
        "it shows what is tokenized before the first step",
        "give data.streaming=false data.max_samples=1000",
    ),
    Pair(_FURTHER_TOKENS, _USER_LOSS, "it would see the hidden states of one depth", "give one of them"),
    Pair(_FURTHER_TOKENS, _COMPILED, "it is not tested with compiled layers", "give compile=false"),
    Pair(
        _FURTHER_TOKENS,
        _SEQUENCE_PARALLEL,
        "the hidden states of several depths are not split by tokens",
        "give sequence_parallel=false",
    ),
    Pair(_FURTHER_TOKENS, _CONTEXT_PARALLEL, "it is not tested with split sequences", _ONE_SEQUENCE),
    Pair(_FURTHER_TOKENS, _EXPERT_PARALLEL, "it is not tested with divided experts", _WHOLE_EXPERTS),
    Pair(_FURTHER_TOKENS, _WEIGHTS_SHARDED, "it is not tested with sharded weights", "give zero_stage=1 or 2"),
    Pair(
        _FURTHER_TOKENS,
        _positive("neftune_noise_alpha"),
        "the noise is that of the inputs, and further tokens use the embedding too",
        "give neftune_noise_alpha=0, or mtp.loss_coef=0",
    ),
    Pair(
        _FURTHER_TOKENS,
        _given("data.collator", "data.collator"),
        "which targets further tokens have is counted in rows as they are stored",
        "omit data.collator, or give mtp.loss_coef=0",
    ),
    Pair(
        _TEACHER,
        _FURTHER_TOKENS,
        "the teacher's distributions are those of the next token",
        "give mtp.loss_coef=0, or distill.teacher=null",
    ),
    Pair(
        _TEACHER,
        _FP16,
        "the gradient of the divergence is computed before the loss scale is known",
        "use precision=bf16, or distill.teacher=null",
    ),
    Pair(_TEACHER, _USER_LOSS, "each of them defines the loss", "give one of them"),
    Pair(_TEACHER, _STREAMED, "the teacher reads rows that are known beforehand", "give data.streaming=false"),
    Pair(
        _TEACHER,
        _given("data.collator", "data.collator"),
        "the teacher's rows are numbered by their targets, which it may move",
        "give data.collator=null",
    ),
    Pair(_ONLINE, _set("distill.num_stages"), _SHARED_STAGES, "omit distill.num_stages"),
    Pair(_ONLINE, _set("distill.tensor_parallel_size"), _SHARED_STAGES, "omit distill.tensor_parallel_size"),
    Pair(_ONLINE, _CONTEXT_PARALLEL, "it is not tested with split sequences", _ONE_SEQUENCE),
    Pair(_ONLINE, _EXPERT_PARALLEL, "it is not tested with divided experts", _WHOLE_EXPERTS),
    Pair(_ONLINE, _WEIGHTS_SHARDED, "the teacher's weights are whole on each rank", "give zero_stage=1 or 2"),
    Pair(
        _ONLINE,
        _is("activation_checkpoint_interval", "auto"),
        "the choice does not count the teacher's memory",
        "give a number",
    ),
    Pair(
        _ONLINE,
        Feature("plan=search", lambda run: run.config.plan == "search", scope=Scope.plan),
        "the search does not count the teacher's memory",
        "give plan=true",
    ),
    Pair(_positive("label_smoothing"), _USER_LOSS, "it smooths the cross entropy", "give one of them"),
    Pair(_DPO, _USER_LOSS, "each of them defines the loss", "give one of them"),
    Pair(_UNPAIRED, _USER_LOSS, "each of them defines the loss", "give one of them"),
    Pair(
        _is("data.name", "classification", "token_classification", "process_reward"),
        _USER_LOSS,
        "each of them defines the loss",
        "give one of them",
    ),
    Pair(_RETRIEVAL, _USER_LOSS, "each of them defines the loss", "give one of them"),
    Pair(
        _positive("dpo.label_smoothing"),
        _is("dpo.loss_type", "ipo", "hinge"),
        "it is the share of flipped labels, for which only sigmoid and robust have a term",
        "give dpo.label_smoothing=0, or dpo.loss_type=sigmoid or robust",
    ),
    Pair(
        _set("warmup_steps"),
        _set("warmup_ratio"),
        "each is the length of the warm-up",
        "give one of them, and null for the other",
    ),
    Pair(
        _FROM_SCRATCH,
        Feature("model=from_checkpoint", lambda run: not run.config.model),
        "nothing states the architecture",
        "choose one of conf/model, such as model=llama_7b",
    ),
    Pair(
        _FROM_SCRATCH,
        _is("tokenizer_name_or_path", "null"),
        "there is no model folder to load the tokenizer from",
        "give tokenizer_name_or_path",
    ),
    Pair(_FROM_SCRATCH, _LORA, _NEEDS_A_MODEL, "give one of them"),
    Pair(_FROM_SCRATCH, _DPO, _NEEDS_A_MODEL, "give one of them"),
    Pair(_FROM_SCRATCH, _UNPAIRED, _NEEDS_A_MODEL, "give one of them"),
    Pair(_FROM_SCRATCH, _EVALUATION, _NEEDS_A_MODEL, "give one of them"),
    *(
        Pair(
            held_out, _EVAL_FILE, "each of them is what is evaluated", f"give eval_file=null, or omit {held_out.words}"
        )
        for held_out in (_EVAL_FRACTION, _EVAL_SAMPLES)
    ),
    Pair(_EVAL_FRACTION, _EVAL_SAMPLES, "each says how much is held out", "give one of them"),
    Pair(_EVALUATION, _NO_EVALUATION, "there is nothing to evaluate", "give eval_file"),
    Pair(_EVALUATION, _given("callbacks", "callbacks"), "they are called while a run trains", "give one of them"),
    Pair(
        _EVALUATION,
        _OVERWRITE,
        "it writes no checkpoint, and the existing ones would be deleted",
        "give one of them",
    ),
    Pair(_given("resume", "resume"), _OVERWRITE, "one continues a run, the other restarts it", "give one of them"),
    Pair(_given("eval_steps", "eval_steps"), _given("eval_epochs", "eval_epochs"), _ONE_CADENCE, "give one of them"),
    Pair(_given("save_steps", "save_steps"), _given("save_epochs", "save_epochs"), _ONE_CADENCE, "give one of them"),
    Pair(
        _KEEP_BEST,
        _is("keep_last", "null"),
        "all checkpoints are kept then",
        "give keep_last too, or keep_best=null",
    ),
    Pair(
        _KEEP_BEST,
        _NO_EVALUATION,
        "there is no evaluation to compare",
        "give eval_file too, or keep_best=null",
    ),
    Pair(
        _is("load_best_model_at_end", "true"),
        _NO_EVALUATION,
        "there is no evaluation to compare",
        "give eval_file too, or load_best_model_at_end=false",
    ),
    Pair(
        _EARLY_STOPPING,
        _NO_EVALUATION,
        "there is no evaluation that could improve",
        "give eval_file too, or early_stopping_patience=null",
    ),
    Pair(
        _EARLY_STOPPING,
        Feature(
            "eval_steps=null and eval_epochs=null", lambda run: not (run.config.eval_steps or run.config.eval_epochs)
        ),
        "the run is evaluated only at its end",
        "give one of them",
    ),
)


def list_conflicts(run: CheckedConfig) -> list[Pair]:
    """Return the pairs of the table of which this run has both features."""
    return [pair for pair in INCOMPATIBLE if pair.first.holds(run) and pair.second.holds(run)]


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
    return feature.words if feature is _NO_GPU else f"`{feature.words}`"
