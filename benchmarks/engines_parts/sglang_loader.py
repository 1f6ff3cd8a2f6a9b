"""SGLang's own code from a folder on the disk to the tensors that its kernels read: its config checked, names and fused
projections brought into its order, experts copied into the pool. Its objects are made without their constructors, which
need a GPU; the server starts with no adapter limits of its own but the rank."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.engines_parts.stand_ins import install

OWN = (
    "sglang.srt.layers.utils.common",
    "sglang.srt.lora.utils",
    "sglang.srt.lora.lora_config",
    "sglang.srt.lora.lora",
    "sglang.srt.lora.layers",
    "sglang.srt.lora.mem_pool",
    "sglang.srt.lora.lora_manager",
)
MATRICES = ("gate_up_proj_moe", "down_proj_moe")


class _DefaultSettings:
    """The environment variables of a server that sets none."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=lambda: False)


_GIVEN = {
    "sglang.srt.distributed": {"divide": lambda total, parts: total // parts},
    "sglang.srt.environ": {"envs": _DefaultSettings()},
}


class SglangLoader:
    """The modules of an unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        install(root, "sglang", OWN, _GIVEN)
        self.modules = {OWN[0]: import_module(OWN[0])}
        import_module("sglang.srt.layers.utils").get_layer_id = self.modules[OWN[0]].get_layer_id  # type: ignore[attr-defined]
        self.modules |= {name: import_module(name) for name in OWN[1:]}

    def load(
        self, folder: Path, class_name: str, config: Any, max_rank: int = 16
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the pool's tensors of the layers' experts after the adapter in `folder` was loaded: by the name of the
        module, then by that of the buffer. Raises what SGLang raises.

        config: of the base model.
        """
        lora_config = self.modules["sglang.srt.lora.lora_config"].LoRAConfig(
            str(folder), base_vocab_size=config.vocab_size
        )
        manager = object.__new__(self.modules["sglang.srt.lora.lora_manager"].LoRAManager)
        self._check(manager, lora_config, max_rank)
        base = nn.Module()
        base.config = config  # type: ignore[assignment]
        adapter = self.modules["sglang.srt.lora.lora"].LoRAAdapter("a", lora_config, config, None, None)
        adapter.initialize_weights_from_tensors(load_file(folder / "adapter_model.safetensors"))
        pool = self._build_pool(manager.target_modules, config, base, max_rank)
        names = [f"model.layers.{layer}.mlp.experts" for layer in range(config.num_hidden_layers)]
        experts = [{name: self._build_experts(config, class_name)} for name in names]
        pool.load_lora_weight_to_buffer("a", 0, adapter, experts, None, None)
        return {
            name: {
                f"{matrix}.{side}": getattr(pool, f"{side}_buffer")[matrix][layer][0]
                for matrix in MATRICES
                for side in "AB"
            }
            for layer, name in enumerate(names)
        }

    def _check(self, manager: Any, lora_config: Any, max_rank: int) -> None:
        """Run the manager's checks of a new adapter, with the targets that it infers from the adapter's config."""
        manager.attn_dp_enabled, manager.lora_refs, manager.configs = False, {}, {"a": lora_config}
        manager.num_pinned_loras, manager.max_loras_per_batch = 0, 8
        manager.lora_added_tokens_size, manager.base_model = 0, nn.Module()
        reference = SimpleNamespace(lora_name="a", lora_path="a", pinned=False)
        manager.validate_new_adapter(lora_config, reference)
        manager.init_lora_shapes(max_lora_rank=max_rank)
        pool = object.__new__(self.modules["sglang.srt.lora.mem_pool"].LoRAMemoryPool)
        pool.max_lora_rank, pool.lora_added_tokens_size, pool.target_modules = max_rank, 0, manager.target_modules
        manager.memory_pool = pool
        manager.validate_new_adapter(lora_config, reference)

    def _build_pool(self, targets: set[str], config: Any, base: nn.Module, max_rank: int) -> Any:
        pool = object.__new__(self.modules["sglang.srt.lora.mem_pool"].LoRAMemoryPool)
        pool.base_hf_config, pool.num_layer, pool.max_loras_per_batch = config, config.num_hidden_layers, 1
        pool.base_model, pool.dtype, pool.tp_size, pool.tp_rank = base, torch.float32, 1, 0
        pool.moe_tp_size, pool.moe_ep_size, pool.attn_tp_size, pool.moe_use_local_expert_ids = 1, 1, 1, False
        pool.max_lora_rank, pool.target_modules, pool.lora_added_tokens_size = max_rank, targets, 0
        pool.experts_shared_outer_loras = pool.strict_loading = pool.enable_lora_overlap_loading = False
        pool.pin_memory_available = False
        pool.embedding_A_buffer, pool.embedding_B_buffer, pool.new_embeddings_buffer = {}, {}, {}
        pool.lm_head_A_buffer, pool.lm_head_B_buffer = {}, {}
        for side in "AB":
            shape = getattr(pool, f"get_lora_{side}_shape")
            buffers = {
                matrix: [torch.zeros(shape(matrix, base, max_rank, layer)) for layer in range(pool.num_layer)]
                for matrix in MATRICES
            }
            others = {name: [torch.zeros(1)] * pool.num_layer for name in targets}  # of modules that are not loaded
            setattr(pool, f"{side}_buffer", {**others, **buffers})
        return pool

    def _build_experts(self, config: Any, class_name: str) -> Any:
        """Return SGLang's wrapper around the experts of a layer. Its gpt-oss sets `gemm1_alpha`, by which it knows that
        the rows of gate and up take turns."""
        module = object.__new__(self.modules["sglang.srt.lora.layers"].FusedMoEWithLoRA)
        nn.Module.__init__(module)
        runner = SimpleNamespace(is_gated=True)
        module.base_layer = SimpleNamespace(is_shared_fused_moe=False, moe_tp_rank=0, moe_runner_config=runner)
        module.tp_size, module.tp_rank = 1, 0
        module._uses_interleaved_gate_up = class_name == "GptOssForCausalLM"
        module.intermediate_size_per_partition = (
            getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        )
        return module
