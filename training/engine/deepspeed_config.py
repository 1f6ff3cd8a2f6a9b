"""DeepSpeed's config dict, built from the run's config by one pure function, so that nothing is stated twice."""

from __future__ import annotations

from typing import Any

from errors import UserError
from training.config.schema import Offload, Precision, RunConfig
from training.distributed.topology import Layout

_NEVER = 10**9  # steps_per_print takes no "off"
# Elements of gradients that are reduced at a time: 200 MB in fp32. DeepSpeed's default is ten times as much; what that
# would gain on a network was not measured.
REDUCE_BUCKET = 50_000_000
# memory_efficient_linear would replace torch's function by one of DeepSpeed's, in the whole process.
MAX_LIVE = 1_000_000_000  # elements of weights that are gathered at a time, and within which they are kept for reuse
STAGE_3 = {
    "memory_efficient_linear": False,
    "stage3_max_live_parameters": MAX_LIVE,
    "stage3_max_reuse_distance": MAX_LIVE,
}


def build_deepspeed_config(
    config: RunConfig, layout: Layout, trains: bool = True, has_accelerator: bool = False
) -> dict[str, Any]:
    """Return the config dict for DeepSpeed's engine; extra keys come from the `deepspeed` group.

    trains: False for an engine without an optimizer. has_accelerator: offloaded tensors then go to pinned memory, which
    is faster to copy to and lets copies overlap with other work.
    Raises UserError for an extra key that is already set from a key of the run.
    """
    built: dict[str, Any] = {
        "train_batch_size": layout.micro_batch_size * layout.gradient_accumulation_steps * layout.num_weight_replicas,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm,  # DeepSpeed clips at 1.0 when it is omitted
        "steps_per_print": _NEVER,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # ZeRO-1 even in fp32: with ZeRO-0 each stage clips by its own norm (seen in 0.19.8)
        "zero_optimization": {
            # below stage 3 gradients are summed and reduced by training/engine/gradient_sums.py
            "stage": 1 if config.shards_gradients_only else config.zero_stage,
            "reduce_bucket_size": REDUCE_BUCKET,
            "offload_optimizer": {"device": config.offload_optimizer.value, "pin_memory": has_accelerator},
        },
        "checkpoint": {"parallel_write": {"pipeline_stage": True}},
        "bf16": {"enabled": config.precision is Precision.bf16},
        "communication_data_type": choose_reduce_dtype(config, layout),
        "fp16": {"enabled": config.precision is Precision.fp16},
    }
    if not trains:
        built["zero_optimization"] = {"stage": 0}
    elif config.offload_optimizer is Offload.none:
        del built["zero_optimization"]["offload_optimizer"]
    if trains and (config.precision is Precision.fp32 or not config.shards_weights):
        built["zero_optimization"]["contiguous_gradients"] = False  # else they are copied into a bucket first
    if config.precision is Precision.bf16 and trains:
        # for fp32 DeepSpeed would sum gradients at stage 1 too, by an optimizer of another class
        built["data_types"] = {"grad_accum_dtype": "fp32" if config.shards_weights else "bf16"}
    if trains and config.shards_weights:
        built["zero_optimization"] |= STAGE_3
        if config.offload_parameters is Offload.cpu:
            built["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": has_accelerator}
    for key, value in config.deepspeed.items():
        if key in built:
            raise UserError(
                f"deepspeed.{key} is written from the run's own keys (batch, precision, ZeRO, clipping); set those "
                "instead"
            )
        built[key] = value
    # else stage 3 waits for the device at the start and end of each micro-batch (0.19.8, utils/timer.py)
    built.setdefault("timers", {"throughput": {"enabled": False}})
    return built


def choose_reduce_dtype(config: RunConfig, layout: Layout) -> str:
    """Return the name of the dtype in which gradients are reduced over replicas.

    A single replica sends nothing, so its gradients reach the optimizer as they were accumulated: in fp32, or in fp16
    with precision=fp16.
    """
    if layout.num_weight_replicas > 1:
        return config.gradient_reduce_dtype.value
    return "fp16" if config.precision is Precision.fp16 else "fp32"
