"""vLLM's own code from a folder on the disk to the tensors that its kernels read: names parsed, config checked, experts
stacked, copied into the buffers of a layer. Its objects are made without their constructors, which need a GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.engines_parts.stand_ins import QuietLogger, install

# In the order in which they are imported
OWN = (
    "vllm.model_executor.utils",
    "vllm.model_executor.models.utils",
    "vllm.lora.layers.base",
    "vllm.lora.layers.fused_moe",
    "vllm.lora.peft_helper",
    "vllm.lora.lora_weights",
    "vllm.lora.utils",
    "vllm.lora.lora_model",
    "vllm.lora.model_manager",
    "vllm.lora.worker_manager",
)
SOURCES = {
    "Qwen3MoeForCausalLM": "qwen3_moe.py",
    "MixtralForCausalLM": "mixtral.py",
    "DeepseekV3ForCausalLM": "deepseek_v2.py",
    "GptOssForCausalLM": "gpt_oss.py",
}
# Of the experts in vLLM's module: its block, and the names by which `FusedMoEFactory` finds an expert's matrices
BLOCKS = {"MixtralForCausalLM": ("block_sparse_moe", ("w1", "w2", "w3"))}
PLAIN = ("mlp", ("gate_proj", "down_proj", "up_proj"))
# What the constructors add to `packed_modules_mapping`, where the config has a rank of the queries
PACKED = {"DeepseekV3ForCausalLM": {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}}
# Modules of a layer besides the experts, by the last part of their names in vLLM
LINEAR = ("qkv_proj", "q_proj", "q_b_proj", "kv_b_proj", "fused_qkv_a_proj", "o_proj", "gate_up_proj", "down_proj")


class VllmLoader:
    """The modules of an unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        install(root, "vllm", OWN, _GIVEN)
        layers, self.modules = import_module("vllm.lora.layers"), {}
        for name in OWN:
            self.modules[name] = import_module(name)
            for kind in ("BaseLayerWithLoRA", "FusedMoEWithLoRA", "FusedMoE3DWithLoRA"):
                if name.startswith("vllm.lora.layers.") and kind in vars(self.modules[name]):
                    setattr(layers, kind, vars(self.modules[name])[kind])

    def load(
        self, folder: Path, class_name: str, config: Any, max_rank: int = 16
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the buffers of the layers' experts after the adapter in `folder` was loaded and activated: by the name
        of the module, then by that of the buffer. Raises what vLLM raises.

        config: of the base model.
        """
        layers = self.modules["vllm.lora.layers.fused_moe"]
        lora_config = SimpleNamespace(
            max_lora_rank=max_rank,
            max_loras=1,
            max_cpu_loras=1,
            lora_dtype=torch.float32,
            fully_sharded_loras=False,
            target_modules=None,
            enable_moe_shared_loras=False,
            enable_mixed_moe_lora_format=False,
        )
        model = self.build_model(class_name, config)
        kind = layers.FusedMoE3DWithLoRA if model.is_3d_moe_weight else layers.FusedMoEWithLoRA
        experts = {
            name: _build_experts(kind, config, lora_config, class_name)
            for name, _ in model.named_modules()
            if name.endswith(".experts")
        }
        manager = self._build_manager(model, lora_config, experts)
        worker = _make(self.modules["vllm.lora.worker_manager"].WorkerLoRAManager)
        worker._lora_model_cls = self.modules["vllm.lora.lora_model"].LoRAModel
        worker._adapter_manager, worker.lora_config = manager, lora_config
        worker.max_position_embeddings, worker.vocab_size = None, config.vocab_size
        request = SimpleNamespace(
            lora_path=str(folder), lora_int_id=1, adapter_id=1, lora_name="a", is_3d_lora_weight=False
        )
        lora = worker._load_adapter(request)
        manager._add_adapter(lora)
        manager.activate_adapter(lora.id)
        return {name: dict(_list_buffers(module)) for name, module in experts.items()}

    def build_model(self, class_name: str, config: Any) -> Any:
        """Return a model with the attributes of vLLM's class, and modules of the names that it has."""
        utils, manager = self.modules["vllm.lora.utils"], self.modules["vllm.lora.model_manager"]
        runner: Any = type(
            "Runner", (utils.MoERunner, nn.Module), {"__new__": object.__new__, "__init__": _init_module}
        )
        linear: Any = type(
            "Linear", (utils.LinearBase, nn.Module), {"__new__": object.__new__, "__init__": _init_module}
        )
        assert manager.MoERunner is utils.MoERunner
        block, names = BLOCKS.get(class_name, PLAIN)
        attributes = self.read_class(class_name)
        model: Any = nn.Module()
        for name, value in attributes.items():
            object.__setattr__(model, name, value)
        for layer in range(config.num_hidden_layers):
            for path in (f"{block}.experts", f"{block}.gate", *(f"self_attn.{name}" for name in LINEAR)):
                module = runner() if path.endswith(".experts") else linear()
                _set_module(model, f"model.layers.{layer}.{path}", module)
        make_mapping = self._read_mapping()
        count, _ = find_sizes(config)
        gate, down, up = names
        object.__setattr__(model, "get_expert_mapping", lambda: make_mapping(gate, down, up, count, 0, ""))
        return model

    def _read_mapping(self) -> Any:
        """Return `RoutedExperts.build_expert_params_mapping`, compiled alone: its module needs a GPU's libraries."""
        file = self.root / "vllm/model_executor/layers/fused_moe/routed_experts.py"
        method = next(
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == "build_expert_params_mapping"
        )
        method.decorator_list = []
        state = SimpleNamespace(
            build_initial_global_physical_to_logical_map=lambda count, redundant: list(range(count + redundant))
        )
        names = {"EplbState": state, "logger": QuietLogger("vllm")}
        exec(compile(ast.Module([method], []), str(file), "exec"), names)
        return names["build_expert_params_mapping"]

    def read_class(self, class_name: str) -> dict[str, Any]:
        """Return the attributes that vLLM's class of this model has for adapters, from its source."""
        file = self.root / "vllm/model_executor/models" / SOURCES[class_name]
        tree = ast.parse(file.read_text())
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        found: dict[str, Any] = {"is_3d_moe_weight": False, "is_non_gated_moe": False, "embedding_modules": {}}
        found |= {"packed_modules_mapping": {}, "lora_skip_prefixes": []}
        for node in _list_bases(classes[class_name], classes):
            found |= self._read_attributes(node, classes)
        return found | {"packed_modules_mapping": {**found["packed_modules_mapping"], **PACKED.get(class_name, {})}}

    def _read_attributes(self, node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> dict[str, Any]:
        known = {"WeightsMapper": self.modules["vllm.model_executor.models.utils"].WeightsMapper}
        wanted = (
            "is_3d_moe_weight",
            "is_non_gated_moe",
            "embedding_modules",
            "packed_modules_mapping",
            "hf_to_vllm_mapper",
            "lora_skip_prefixes",
        )
        found = {}
        for statement in node.body:
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            target = statement.targets[0] if isinstance(statement, ast.Assign) else target
            if not isinstance(target, ast.Name) or target.id not in wanted:
                continue
            value: Any = statement.value  # type: ignore[attr-defined]
            if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id in classes:
                found |= self._read_attributes(classes[value.value.id], classes)  # of the model inside
            else:
                found[target.id] = eval(compile(ast.Expression(value), node.name, "eval"), dict(known))
        return found

    def _build_manager(self, model: Any, lora_config: Any, experts: dict[str, Any]) -> Any:
        module, utils = self.modules["vllm.lora.model_manager"], self.modules["vllm.lora.utils"]
        manager = _make(module.LoRAModelManager)
        manager.model, manager.lora_config, manager.supports_mm = model, lora_config, False
        manager.supported_lora_modules = utils.get_supported_lora_modules(model)
        manager.is_pooling_model, manager._is_moe, manager._use_ep = False, utils.is_moe_model(model), False
        manager._enable_mixed_moe_lora_format = manager._enable_moe_shared_loras = False
        manager._is_3d_moe_model, manager._is_non_gated_moe = model.is_3d_moe_weight, model.is_non_gated_moe
        manager.packed_modules_mapping = utils.process_packed_modules_mapping(model)
        manager.modules, manager.packed_modules, manager.moe_ep_load_spec = experts, {}, None
        manager._classification_head, manager.lora_index_to_id = None, [None]
        manager._registered_adapters, manager._active_adapters = {}, {}
        for name in experts:
            manager._register_packed_modules(name)
        return manager


_GIVEN = {
    "vllm.logger": {"init_logger": QuietLogger},
    "vllm.utils.torch_utils": {"PIN_MEMORY": False},
    "vllm.distributed.utils": {"divide": lambda total, parts: total // parts},
}


def _init_module(self: nn.Module) -> None:
    nn.Module.__init__(self)


def _make(kind: type) -> Any:
    """Return an object whose constructor has not run."""
    return object.__new__(kind)


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in dict(model.named_children()):
            model.add_module(parent, nn.Module())
        model = model.get_submodule(parent)
    model.add_module(last, module)


def _list_bases(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield the classes of the file that a class inherits from, and the class itself at the end."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _list_bases(classes[base.id], classes)
    yield node


def _build_experts(kind: type, config: Any, lora_config: Any, class_name: str) -> Any:
    """Return vLLM's wrapper around the experts of a layer, with its buffers."""
    count, width = find_sizes(config)
    module = _make(kind)
    nn.Module.__init__(module)
    parallel = SimpleNamespace(use_ep=False, ep_rank=0, tp_size=1, tp_rank=0)
    module.moe_config = SimpleNamespace(
        hidden_dim=config.hidden_size,
        num_local_experts=count,
        num_experts=count,
        intermediate_size_per_partition=width,
        intermediate_size_per_partition_unpadded=None,
        moe_parallel_config=parallel,
    )
    module.tp_size, module.tp_rank, module.device = 1, 0, torch.device("cpu")
    module._w13_slices, module.enable_moe_shared_loras = (1 if "3D" in kind.__name__ else 2), False
    module.create_lora_weights(1, lora_config, SimpleNamespace(architectures=[class_name]))
    return module


def find_sizes(config: Any) -> tuple[int, int]:
    """Return the number of experts and the intermediate size of one."""
    count = next(
        getattr(config, key)
        for key in ("n_routed_experts", "num_local_experts", "num_experts")
        if getattr(config, key, None) is not None
    )
    return count, getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def _list_buffers(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"):
        for index, buffer in enumerate(getattr(module, f"{name}_stacked")):
            yield f"{name}[{index}]", buffer[0]
