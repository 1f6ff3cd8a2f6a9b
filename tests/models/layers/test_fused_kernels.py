"""Which parts of a layer liger-kernel replaces, and that they compute the same."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.chain import BOUND, Chain, difference, positions, tokens
from support.families import FAMILIES, build_family
from support.fused_kernels import Played
from transformers import AutoConfig, AutoModelForCausalLM

from models.generic.shrink import shrink
from models.layers import fused_kernels
from models.layers.fused_kernels import describe_fused, find_obstacle, find_triton_obstacle, fuse_kernels
from training.config.schema import CheckpointMode
from training.pipeline.activation_checkpoint import ActivationCheckpointing

# Of a chain of 4 decoder layers: the norms include the final one, deepseek_v3's MLPs the shared experts
PARTS = {
    "llama": {"RMSNorm": 9, "SwiGLU": 4, "rotary": 4},
    "mistral": {"RMSNorm": 9, "SwiGLU": 4, "rotary": 4},
    "qwen2": {"RMSNorm": 9, "SwiGLU": 4, "rotary": 4},
    "qwen3": {"RMSNorm": 17, "SwiGLU": 4, "rotary": 4},
    "phi3": {"RMSNorm": 9},  # one matrix for gate and up, and a part of the head is rotated
    "olmo2": {"SwiGLU": 4},  # the weight is applied before the cast back, and the rotation is in fp32
    "gemma2": {"rotary": 4},  # 1 + weight, GELU
    "deepseek_v3": {"RMSNorm": 17, "SwiGLU": 4},  # its rotation can be interleaved
    "deepseek_v32": {"RMSNorm": 17, "SwiGLU": 4},
    "glm_moe_dsa": {"RMSNorm": 17, "SwiGLU": 4},
    "gpt2": {},
    "gpt_oss": {},  # the weight is applied before the cast back; a rotation and a gate of its own
    "llama4_text": {},  # the weight is applied after the cast, too, but in different code
    "mpt": {},
}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    kernels = Played()
    monkeypatch.setattr(fused_kernels, "_kernels", lambda on_meta: kernels)
    return kernels.calls


def fuse(chain: Chain) -> set[str]:
    return set().union(*(fuse_kernels(module) for module in chain.stages))


def run(chain: Chain) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits and gradients."""
    chain.zero_grad()
    logits = chain(tokens(), positions())
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits, {name: gradient.clone() for name, gradient in chain.gradients().items()}


def assert_same(found: tuple, expected: tuple, bound: float) -> None:
    assert difference(found[0], expected[0]) < bound
    for name, gradient in expected[1].items():
        assert difference(found[1][name], gradient) < bound, name


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_what_runs_llamas_code_is_replaced_and_nothing_else(model_type: str, played: Counter[str]) -> None:
    model = build_family(model_type)
    chain, other = Chain(model), Chain(model)
    names, expected = chain.state_dict().keys(), run(chain)
    assert fuse(chain) == PARTS[model_type].keys() and chain.state_dict().keys() == names
    assert_same(run(chain), expected, BOUND)
    assert played == PARTS[model_type]
    run(other)
    model(tokens(), use_cache=False)
    assert played == PARTS[model_type], "another model of the process runs the kernels"


def test_published_families_have_the_parts_that_they_share_with_llama(played: Counter[str]) -> None:
    found = {}
    for model_type in ("smollm3", "glm4", "arcee"):
        config = shrink(AutoConfig.for_model(model_type))
        config.vocab_size = 320
        chain = Chain(AutoModelForCausalLM.from_config(config))
        expected = run(chain)
        found[model_type] = fuse(chain)
        assert_same(run(chain), expected, BOUND)
    assert found == {"smollm3": {"RMSNorm", "SwiGLU", "rotary"}, "glm4": {"RMSNorm"}, "arcee": {"RMSNorm", "rotary"}}


def test_triton_needs_a_compiler_and_the_headers_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "no-such-compiler")
    assert find_triton_obstacle() == "triton needs a C compiler, and no-such-compiler is not there"
    monkeypatch.setenv("CC", sys.executable)
    assert find_triton_obstacle() == (f"triton needs {tmp_path}/Python.h, which is in python3-dev or python3-devel")
    (tmp_path / "Python.h").touch()
    assert find_triton_obstacle() is None
    with monkeypatch.context() as old_gpu:
        old_gpu.setattr("torch.cuda.is_available", lambda: True)
        old_gpu.setattr("torch.cuda.get_device_capability", lambda: (6, 0))
        assert find_triton_obstacle() == "triton needs a GPU of compute capability 7.0 or above, and this one has 6.0"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_triton_obstacle() == "triton needs a C compiler, and gcc or clang is not there"


def test_it_is_said_why_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_obstacle(torch.device("cpu")) == "liger-kernel's kernels need a GPU"
    for missing, words in (("triton", "the package triton is"), ("liger_kernel", "the package liger-kernel is")):
        monkeypatch.setattr(fused_kernels, "find_spec", lambda name, missing=missing: None if name == missing else name)
        assert find_obstacle(torch.device("cuda", 0)) == f"{words} not installed"
        assert describe_fused(set(), f"{words} not installed") == f"nothing is fused: {words} not installed"
    monkeypatch.setattr(fused_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(fused_kernels, "find_triton_obstacle", lambda: None)
    assert find_obstacle(torch.device("cuda", 0)) is None
    assert describe_fused({"rotary", "RMSNorm"}, None) == "RMSNorm, rotary by liger-kernel"
    assert describe_fused(set(), None) == "nothing is fused: no part of these layers is one that it has a kernel for"


ROOT = Path(__file__).resolve().parents[3]
has_kernels = find_spec("triton") is not None and find_spec("liger_kernel") is not None
interpreter = pytest.mark.skipif(
    not has_kernels or os.environ.get("TRITON_INTERPRET") != "1", reason="run by the test before it"
)


@pytest.mark.full
@pytest.mark.skipif(
    not has_kernels or torch.cuda.is_available(),
    reason="needs triton and liger-kernel, and no GPU, which compiles them",
)
def test_the_kernels_in_the_interpreter() -> None:
    """The tests below, in a process of their own: triton reads the variable when it is imported, and conftest.py
    cleans it away."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-k", "interpreted", __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "6 passed" in result.stdout, result.stdout


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`models.layers.liger` in Triton's interpreter, which computes in fp32 (numpy has no bf16) and supports neither
    floats as arguments (3.7) nor CUDA's rsqrt."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats(argument: object) -> object:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert_floats)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    return importlib.import_module("models.layers.liger")


@interpreter
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v3", "phi3"])
def test_interpreted_kernels_compute_the_same(model_type: str, kernels: ModuleType) -> None:
    chain = Chain(build_family(model_type))
    expected = run(chain)
    assert fuse(chain) == PARTS[model_type].keys()
    assert_same(run(chain), expected, BOUND)


@interpreter
def test_no_interpreted_kernel_writes_into_what_it_is_given(kernels: ModuleType) -> None:
    """A recompute or a second backward pass would read its inputs again."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads = [draw(2, 8, count, 12).transpose(1, 2) for count in (4, 2)]  # as projections make them
    angles = [draw(2, 8, 12) for _ in range(2)]
    for function, inputs in (
        (lambda x, weight: kernels.normalize(x, weight, 1e-6), [draw(2, 8, 48), draw(48)]),
        (kernels.multiply_gated, [draw(2, 8, 80), draw(2, 8, 80)]),
        (lambda *two: kernels.rotate(*two, *angles), heads),
    ):
        given = [tensor.detach().requires_grad_() for tensor in inputs]
        before = [tensor.detach().clone() for tensor in given]
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.randn_like(output) for output in outputs]  # in their memory order, so that nothing is copied
        kept = [gradient.clone() for gradient in gradients]
        first = torch.autograd.grad(outputs, given, gradients, retain_graph=True)
        first = [gradient.clone() for gradient in first]
        second = torch.autograd.grad(outputs, given, gradients)
        assert all(map(torch.equal, [*given, *gradients, *second], [*before, *kept, *first]))


@interpreter
def test_selective_checkpointing_of_interpreted_kernels_gives_the_same_gradients(kernels: ModuleType) -> None:
    """It reuses the projections that rotary and SwiGLU would have overwritten."""
    model = build_family("llama")
    model.config._attn_implementation = "sdpa"
    chain = Chain(model)
    layer, fused = chain.stages[1], Chain(model).stages[1]
    fuse_kernels(fused)
    hidden_states = torch.randn(3, 24, 48, requires_grad=True)
    integers = (positions(), torch.ones(3, 24, dtype=torch.int32))
    expected = torch.autograd.grad(
        layer((hidden_states, *integers))[0].square().sum(), [hidden_states, *layer.parameters()]
    )
    checkpoint = ActivationCheckpointing(1, CheckpointMode.selective).build_function()
    output, *_ = checkpoint(lambda *inputs: fused(inputs), hidden_states, *integers)
    found = torch.autograd.grad(output.square().sum(), [hidden_states, *fused.parameters()])
    assert all(difference(a, b) < BOUND for a, b in zip(found, expected, strict=True))
