"""The parts of other packages that the project uses beyond their documented interfaces: one table, checked at start.

Private attributes, overridden methods, and names that are patched or written to. A release that renames one of them
would often have no visible effect at first: an override that is no longer called, an attribute that nothing reads, an
optimizer whose state is not found. So a run does not start when one is missing, and its error names it.

A name is looked up in the object at `place`, "module:Class.method". An attribute that only instances have counts as
present when a method of the class stores it; one that a function reads or sets on its arguments, when the function's
code names it. Nothing is instantiated, and nothing is imported that a run does not import by itself.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from types import CodeType, FunctionType
from typing import Any

from errors import UserError


@dataclass(frozen=True)
class Package:
    """Versions of a package. read: whose source the table was made from. works: known to work, as in pyproject.toml."""

    read: str
    works: str


@dataclass(frozen=True)
class Internal:
    """Names in one place of a package, and what they are used for."""

    package: str  # the name to install it by
    place: str
    names: tuple[str, ...]
    use: str
    is_needed: bool = True  # a run starts without the others, and says what is missing when it needs it


PACKAGES = {
    "deepspeed": Package("0.19.8", ">=0.19.4,<0.20"),
    "torch": Package("2.13.0", ">=2.11"),
    "transformers": Package("5.24.0", ">=5.21,<6"),
    "peft": Package("0.21.2", ">=0.19.1"),
    "hydra-core": Package("1.3.8", ">=1.3.2,<1.4"),
    "liger-kernel": Package("0.8.5", ">=0.8"),
}
# Imported only by a run that asks for what they do
OPTIONAL = {"peft", "liger-kernel"}

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_BUILDING = ("_partition_layers", "_build", "_synchronize_tied_weights")
_KEPT_OPERATORS = (
    "_grouped_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
_BLOCK_KERNELS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_flash_attention_forward",
    "_flash_attention_backward",
)  # fmt: skip


def _list_deepspeed() -> Iterator[tuple[str, tuple[str, ...], str]]:
    # training/engine/gradient_sums.py
    sums = "summing gradients and handing them to the optimizer"
    parts = ("bit16_groups", "partition_size", "params_in_partition", "dp_process_group", "reduce_bucket_size")
    yield _ZERO, (*parts, "averaged_gradients", "_grad_acc_hooks", "scale_if_loss"), sums
    yield f"{_ZERO}._get_preflattened_grad_partition", ("averaged_gradients",), sums
    yield _ZERO, ("cpu_offload", "single_partition_of_fp32_groups"), "handing gradients to an optimizer on the host"
    norm = "the gradient's norm"
    yield f"{_ZERO}.step", ("check_grad_overflow", "check_overflow", "scaled_global_norm"), norm
    yield f"{_MODULE}._build", ("ds_pipe_replicated",), norm
    # training/engine/one_pass_step.py
    update = "clipping, updating and rounding in one kernel"
    scaled = ("loss_scale", "_update_scale", "clip_grad", "_global_grad_norm")
    yield _ZERO, (*scaled, "_lazy_init_hp_params_optimizer_state", "_update_model_bit16_weights"), update
    gathered = ("bit16_groups_flat", "nccl_start_alignment_factor", "allgather_bucket_size")
    yield _ZERO, ("parallel_partitioned_bit16_groups", *gathered), update
    yield f"{_ENGINE}._take_model_step", ("step", "_global_grad_norm"), update
    # training/engine/pipeline_engine.py, training/engine/deepspeed_backed.py
    yield _ENGINE, ("_take_model_step", "set_gradient_accumulation_boundary"), "taking a step"
    yield _ENGINE, ("global_steps", "global_samples", "device", "optimizer"), "taking a step"
    # training/pipeline/module.py
    yield _MODULE, (*_BUILDING, "_precompute_checkpointable_values"), "building a stage without random weights"
    yield f"{_MODULE}.__init__", _BUILDING, "building a stage without random weights"
    yield _MODULE, ("_set_bounds", "parts", "stage_owner"), "choosing the layers of a stage"
    yield f"{_MODULE}._index_tied_modules", ("stage_owner",), "choosing the layers of a stage"
    running = ("forward", "forward_funcs", "is_checkpointable_results", "activation_checkpoint_func")
    yield _MODULE, running, "running a chunk of a stage"
    yield f"{_MODULE}.forward", running[1:], "running a chunk of a stage"
    yield _MODULE, ("num_stages", "stage_id", "global_rank", "local_rank"), "finding a stage's place"
    yield _MODULE, ("topology", "mpu"), "finding a stage's place"
    yield _MODULE, ("tied_modules", "get_tied_weights_and_groups"), "summing the gradients of tied weights"
    # training/engine/shard_groups.py, training/engine/pipeline_engine.py
    grouped = "sharding within groups"
    yield _ENGINE, ("_configure_zero_optimizer", "seq_data_parallel_group"), grouped
    yield f"{_ENGINE}._configure_zero_optimizer", ("seq_data_parallel_group",), grouped
    experts = "partitioning experts over the ranks that have the same ones"
    moe = ("has_moe_layers", "expert_parallel_group", "expert_data_parallel_group")
    yield _ENGINE, ("_broadcast_model", *moe), experts
    yield f"{_ENGINE}._configure_zero_optimizer", moe, experts
    yield _ZERO, ("real_dp_process_group",), experts
    yield f"{_ZERO}._configure_moe_settings", ("real_dp_process_group", "name"), experts
    yield f"{_ZERO}.is_moe_group", ("moe",), experts
    yield "deepspeed.moe.utils:is_moe_param", ("allreduce",), experts
    # training/engine/partitions.py, training/pipeline/weight_sharding.py
    stage_3 = ("fp32_partitioned_groups_flat", "grad_position", "get_param_id", "optimizer", "overflow")
    yield "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", stage_3, "reading what stage 3 holds"
    sharded = "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param"
    yield sharded, ("ds_tensor", "ds_shape", "ds_numel", "ds_zero_partition_rank"), "reading what stage 3 holds"
    # training/engine/zero3.py
    hooks = ("pre_sub_module_forward_function", "post_sub_module_forward_function")
    fetching = "fetching weights under selective checkpointing"
    yield "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", ("parameter_offload",), fetching
    yield "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload", hooks, fetching
    reducing = ("independent_gradient_partition_epilogue", "reduce_and_partition_stream")
    waiting = "waiting for reduced gradients on the device"
    yield "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", reducing, waiting
    # training/engine/pipeline_engine.py, training/distributed/process.py
    yield "deepspeed.comm.torch:build_shm_op", ("__compatible_ops__",), "not compiling an op that nothing calls"
    yield _ZERO, ("optimizer", "param_groups", "overflow"), "reading what the optimizer holds"
    yield _ZERO, ("loss_scaler",), "saving the loss scale"
    yield f"{_ZERO}.step", ("_update_scale",), "changing the loss scale at the end of a step"
    scaler = "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler"
    yield scaler, ("dynamic", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"), "saving the loss scale"
    linked = "deepspeed.utils.mixed_precision_linkage:link_hp_params"
    yield linked, ("_hp_mapping",), "finding a parameter's optimizer state"
    fragment = "deepspeed.utils.tensor_fragment:tensor_fragment"
    fields = ("param_group_index", "hp_fragment_address", "lp_fragment_address")
    yield fragment, fields, "finding a parameter's optimizer state"
    address = "deepspeed.utils.tensor_fragment:fragment_address"
    yield address, ("start", "numel"), "finding a parameter's optimizer state"


def _list_optional() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    recorder = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    yield "torch", "torch._C._distributed_c10d", recorder, "naming the operation that ranks wait in"


def _list_others() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    yield "torch", "torch._C", ("_distributed_c10d",), "naming the operation that ranks wait in"
    groups = "torch.distributed.distributed_c10d"
    yield "torch", groups, ("_world", "_set_pg_timeout"), "limiting how long ranks wait for each other"
    yield "torch", f"{groups}:_World", ("pg_map",), "limiting how long ranks wait for each other"
    yield "torch", "torch", ("_foreach_norm",), "the gradient's norm"
    compiled = ("callback_handler",)
    yield "torch", "torch._dynamo.callback", compiled, "counting compilation as progress"
    folder = "torch._inductor.runtime.cache_dir_utils"
    yield "torch", folder, ("default_cache_dir",), "keeping compiled code in a folder of the run"
    callbacks = ("start_callbacks", "end_callbacks")
    yield "torch", "torch._dynamo.callback:CompilationCallbackHandler", callbacks, "counting compilation as progress"
    modes = "torch.utils._python_dispatch"
    yield "torch", modes, ("_disable_current_modes",), "computing masks under selective checkpointing"
    yield "torch", modes, ("TorchDispatchMode",), "counting what selective checkpointing keeps"
    yield "torch", "torch.utils._pytree", ("tree_leaves",), "counting what selective checkpointing keeps"
    yield "torch", "torch:UntypedStorage", ("_cdata",), "counting what a backward pass needs"
    yield "torch", "torch:ops.aten", _KEPT_OPERATORS, "choosing what selective checkpointing keeps"
    yield "torch", "torch:ops.aten", _BLOCK_KERNELS, "attention of queries to one block of keys at a time"
    yield "torch", "torch", ("_C",), "counting the tokens of experts once"
    yield "torch", "torch._C", ("_current_graph_task_id",), "counting the tokens of experts once"
    yield "torch", "torch._C", ("_set_sm_carveout_experimental",), "sparing multiprocessors (flash_kernels=fa3)"
    config = "transformers.configuration_utils:PreTrainedConfig"
    yield "transformers", config, ("_attn_implementation",), "choosing the attention kernel"
    yield "transformers", config, ("_experts_implementation",), "choosing how experts are computed"
    yield "transformers", "transformers.integrations.moe", ("_default_apply_gate",), "computing experts with SwiGLU"
    model = "transformers.modeling_utils:PreTrainedModel"
    yield "transformers", model, ("_init_weights",), "drawing random weights (init=random)"
    kernels = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    yield "transformers", model, kernels, "choosing the attention kernel"
    saves = "transformers.core_model_loading:revert_weight_conversion"
    yield "transformers", saves, ("_weight_conversions",), "naming the tensors of a wrapped model"
    yield "transformers", model, ("_tied_weights_keys",), "tying the head of a text model"
    in_fp32 = "keeping the gates of mixtures in fp32"
    yield "transformers", model, ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"), in_fp32
    ignored = "knowing which other tensors a checkpoint may hold"
    yield "transformers", model, ("_keys_to_ignore_on_load_unexpected",), ignored
    experts = "transformers.integrations.moe:use_experts_implementation"
    yield "transformers", experts, ("_apply_gate",), "computing experts"
    rendering = "transformers.utils.chat_template_utils"
    yield "transformers", rendering, ("_compile_jinja_template",), "rendering chat templates, with a date of their own"
    layer = "peft.tuners.lora.layer:LoraLayer"
    yield (
        "peft",
        "peft.tuners.tuners_utils:BaseTunerLayer",
        ("enable_adapters",),
        "running the model without its adapter",
    )
    yield "peft", layer, ("base_layer", "lora_A", "lora_B"), "sharding an adapter"
    stacked = ("get_param", "num_experts", "parameter_name")
    yield "peft", "peft.tuners.lora.layer:ParamWrapper", stacked, "adapters of experts"
    conversion = "peft.utils.transformers_weight_conversion"
    yield "peft", conversion, ("convert_peft_config_for_transformers",), "naming an adapter's targets as peft does"
    yield "hydra-core", "hydra._internal.utils", ("get_args_parser",), "reading the command line"
    loader = "hydra._internal.config_loader_impl:ConfigLoaderImpl"
    yield "hydra-core", loader, ("get_search_path", "repository"), "reading --config-dir"
    fused = "fused kernels (fused_kernels=auto)"
    yield "liger-kernel", "liger_kernel.ops", ("LigerRMSNormFunction",), fused
    yield "liger-kernel", "liger_kernel.ops.rope", ("rope_forward", "rope_backward"), fused
    yield "liger-kernel", "liger_kernel.ops.swiglu", ("swiglu_forward", "swiglu_backward"), fused
    repository = "hydra._internal.config_repository:ConfigRepository"
    yield "hydra-core", repository, ("initialize_sources",), "reading --config-dir"


TABLE = (
    *(Internal("deepspeed", *entry) for entry in _list_deepspeed()),
    *(Internal(*entry) for entry in _list_others()),
    *(Internal(*entry, is_needed=False) for entry in _list_optional()),
)


def check_internals(imported: Collection[str] = (), package: str | None = None) -> None:
    """Check that the installed packages have every name of the table that a run needs.

    imported: the optional packages that this run imports. package: checks this one alone.
    Raises UserError, one line that names it, for a name that is missing.
    """
    for entry in TABLE:
        is_imported = entry.package not in OPTIONAL or entry.package in imported
        if entry.is_needed and (entry.package == package or (package is None and is_imported)):
            missing = find_missing(entry)
            if missing is not None:
                raise explain_missing(entry.package, missing, entry.use)


def explain_missing(package: str, name: str, use: str) -> UserError:
    """Return the error for a name that the installed version lacks. use: what the project needs it for."""
    works = PACKAGES[package].works
    return UserError(
        f"{package} {version(package)} has no {name}, which is needed for {use}; known to work are {package}{works} "
        "(pip install -r requirements.txt)"
    )


def patch(patched: Any, name: str, value: Any) -> None:
    """Replace the attribute `name` of `patched`, an object or a module. Raises UserError when it does not exist."""
    if not hasattr(patched, name):
        owner = getattr(patched, "__name__", type(patched).__name__)
        raise explain_missing("deepspeed", f"{owner}.{name}", "a patch of training/engine/")
    setattr(patched, name, value)


def find_missing(entry: Internal) -> str | None:
    """Return the first missing name of `entry`, qualified by where it was looked up; None when all exist."""
    module, _, path = entry.place.partition(":")
    dotted = f"{module}.{path}".rstrip(".")
    try:
        owner = importlib.import_module(module)
        for part in path.split(".") if path else ():
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return dotted
    return next((f"{dotted}.{name}" for name in entry.names if not has_name(owner, name)), None)


def has_name(owner: Any, name: str) -> bool:
    """Returns whether `owner` has the attribute or field. A class also has what one of its methods stores in an
    instance, a function what its code reads, sets or names."""
    if isinstance(owner, FunctionType):
        return any(name in code.co_names or name in code.co_consts for code in _list_code(owner))
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    return isinstance(owner, type) and any(_stores(code, name) for code in _list_methods(owner))


def _list_methods(owner: type) -> Iterator[CodeType]:
    """Yield the code of the methods of a class and of its base classes in the same package."""
    package = owner.__module__.partition(".")[0]
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] == package:
            for member in vars(base).values():
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                yield from _list_code(function)


def _list_code(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function, without its decorators, and of functions defined in it; nothing for other
    objects."""
    function = inspect.unwrap(function) if callable(function) else function
    pending = [function.__code__] if isinstance(function, FunctionType) else []
    while pending:
        code = pending.pop()
        yield code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _stores(code: CodeType, name: str) -> bool:
    return name in code.co_names and name in _list_stored(code)


@cache
def _list_stored(code: CodeType) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
