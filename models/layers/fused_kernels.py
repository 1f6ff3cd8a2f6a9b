"""`fused_kernels=auto`: RMSNorm, SwiGLU and rotary positions of decoder layers by liger-kernel's Triton kernels.

A part is replaced where its class runs exactly Llama's code, which `transformers` copies into the file of each family
that does the same; code that differs (Gemma's 1 + weight, OLMo's order of casts, GELU, partial or interleaved rotation,
fused projections) is left alone. Only the `forward` of single modules is replaced: names, parameters and other models
of the process stay as they are, and so do adapters and sharded projections, which are modules that it calls.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama

from models.layers.decoder import PipelineNorm

_OLDEST = (7, 0)  # compute capability that torch's inductor compiles for
_ROTARY = "apply_rotary_pos_emb"


def find_obstacle(device: torch.device) -> str | None:
    """Return why nothing can be fused on this device; None where it can."""
    if device.type != "cuda":
        return "liger-kernel's kernels need a GPU"
    if find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed"
    return find_triton_obstacle()


def find_triton_obstacle() -> str | None:
    """Return why triton cannot make kernels for a GPU here; None where it can. It compiles modules of this Python as it
    runs (3.7, triton/runtime/build.py)."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"triton needs a C compiler, and {' or '.join(compilers)} is not there"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"triton needs {header}, which is in python3-dev or python3-devel"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else _OLDEST
    if capability < _OLDEST:
        found, oldest = (".".join(map(str, each)) for each in (capability, _OLDEST))
        return f"triton needs a GPU of compute capability {oldest} or above, and this one has {found}"
    return None


def describe_fused(fused: set[str], obstacle: str | None) -> str:
    """Return a line for the screen: the kernels that `fuse_kernels` has used, or why it has used none."""
    if fused:
        return f"{', '.join(sorted(fused))} by liger-kernel"
    return f"nothing is fused: {obstacle or 'no part of these layers is one that it has a kernel for'}"


def fuse_kernels(layer: nn.Module) -> set[str]:
    """Replace parts of a layer by fused kernels and return the names of the kernels. Weights and adapters must be in
    place already."""
    fused = set()
    for module in layer.modules():
        for name, replace in REPLACEMENTS.items():
            forward = replace(module)
            if forward is not None:
                module.forward = MethodType(forward, module)
                fused.add(name)
    return fused


def _replace_norm(module: nn.Module) -> Callable[..., Any] | None:
    if isinstance(module, PipelineNorm):
        own = getattr(super(PipelineNorm, module).forward, "__func__", None)
        return _normalize_activations if _is_copy(own, llama.LlamaRMSNorm.forward) else None
    return _normalize if _is_copy(type(module).forward, llama.LlamaRMSNorm.forward) else None


def _replace_mlp(module: nn.Module) -> Callable[..., Any] | None:
    is_swiglu = _is_copy(type(module).forward, llama.LlamaMLP.forward) and type(module.act_fn) is type(ACT2FN["silu"])
    return _run_mlp if is_swiglu else None


def _replace_attention(module: nn.Module) -> Callable[..., Any] | None:
    if "Attention" not in type(module).__name__:  # an indexer, whose heads are rotated in another layout
        return None
    forward = inspect.unwrap(type(module).forward)  # transformers' decorators rename arguments of older callers (5.24)
    names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
    if [name for name in names if name.startswith(_ROTARY)] != [_ROTARY]:  # another one next to it: interleaved
        return None
    found = forward.__globals__
    copies = (_is_copy(found.get(name), getattr(llama, name)) for name in (_ROTARY, "rotate_half"))
    return _with_fused_rotary(forward) if all(copies) else None


REPLACEMENTS = {"RMSNorm": _replace_norm, "SwiGLU": _replace_mlp, "rotary": _replace_attention}


def _is_copy(function: Any, original: FunctionType) -> bool:
    """Return whether both run the same code, apart from docstrings and annotations."""
    own, other = getattr(function, "__code__", None), original.__code__
    if own is None or (own.co_code, own.co_names) != (other.co_code, other.co_names):
        return False
    return [c for c in own.co_consts if not isinstance(c, str)] == [
        c for c in other.co_consts if not isinstance(c, str)
    ]


@functools.cache
def _with_fused_rotary(forward: FunctionType) -> FunctionType:
    """Return a copy of the function that uses the fused `apply_rotary_pos_emb`: its module, and all other models, keep
    the original."""
    own = forward.__globals__[_ROTARY]

    def apply(query: Any, key: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if unsqueeze_dim != 1:
            return own(query, key, cos, sin, unsqueeze_dim)
        return _kernels(query.is_meta).rotate(query, key, cos, sin)

    copied = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: apply},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _normalize(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _kernels(hidden_states.is_meta).normalize(hidden_states, module.weight, module.variance_epsilon)


def _normalize_activations(module: Any, inputs: Any) -> Any:
    return _normalize(module, inputs[0]), *inputs[1:]


def _run_mlp(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    kernels = _kernels(hidden_states.is_meta)
    gated = kernels.multiply_gated(module.gate_proj(hidden_states), module.up_proj(hidden_states))
    return module.down_proj(gated)


@functools.cache
def _kernels(on_meta: bool) -> ModuleType:
    """on_meta: where a plan counts them, without triton, which not every machine has."""
    return importlib.import_module("models.layers.liger_on_meta" if on_meta else "models.layers.liger")
