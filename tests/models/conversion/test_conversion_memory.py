"""The converter's anonymous memory, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.model_folders import save_source
from support.quantized import save_fp8, save_int4, save_mxfp4

ROOT = Path(__file__).resolve().parents[3]
KEPT = str(2**19)  # bytes: larger tensors leave the process when they are freed, where malloc would keep up to 32 MiB
MEMORY_SCRIPT = """
import re, sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from models.families import deepseek_v3, llama  # imports are not measured
from models.architecture.lookup import build_layers
from models.conversion.convert import WriteOptions, convert_to_pipeline, export_hugging_face
from models.weights.vocabulary import AutoTokenizer
from models.weights.sources import open_weights

root, peak, stop = Path(sys.argv[1]), 0, False

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def watch():
    global peak
    while not stop:
        peak = max(peak, anonymous())
        time.sleep(0.001)

steps = [step.split() for step in sys.argv[2:]]
for source, *_ in steps[:1]:
    build_layers(open_weights(str(root / source)).config)  # a family without a file is proven first
start = anonymous()
threading.Thread(target=watch, daemon=True).start()
for source, output, *dtype in steps:
    go = convert_to_pipeline if output in ("pipeline", "wide") else export_hugging_face
    peak = 0
    go(open_weights(str(root / source)), root / output, WriteOptions(dtype=getattr(torch, *dtype) if dtype else None))
    print(peak - start)
stop = True
"""


@pytest.mark.full
def test_memory_stays_below_twice_the_largest_layer(tmp_path: Path) -> None:
    save_source(
        tmp_path / "hf",
        "safetensors",
        torch.bfloat16,
        vocab_size=2_000,
        hidden_size=512,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    steps = ("hf pipeline", "pipeline back", "hf wide float32", "wide narrow bfloat16")
    largest = (4 * 512**2 + 3 * 512 * 3072 + 2 * 512) * 2  # bytes of a decoder layer in bf16
    bounds = (2 * largest, 2 * largest, 2 * 2 * largest, 2 * 2 * largest)
    for peak, bound in zip(measure(tmp_path, *steps), bounds, strict=True):
        assert peak < bound, (peak, largest)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fp8", "mxfp4", "int4"])
def test_quantized_weights_take_a_layer_and_little_more(method: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 3, "vocab_size": 320}
    if method == "fp8":
        save_fp8(tmp_path / "hf", moe_intermediate_size=512, n_routed_experts=16, **sizes)
    elif method == "int4":
        save_int4(tmp_path / "hf", moe_intermediate_size=512, n_routed_experts=16, **sizes)
    else:
        save_mxfp4(tmp_path / "hf", intermediate_size=512, num_local_experts=16, **sizes)
    experts = 16 * 3 * 512 * 512 * 2  # bytes of a layer's, in bf16
    for peak in measure(tmp_path, "hf pipeline", "hf back", MALLOC_MMAP_THRESHOLD_=KEPT):
        assert peak < 1.3 * experts, (peak, experts)


def measure(folder: Path, *steps: str, **environment: str) -> list[int]:
    """Return the peak of each step "source output [dtype]", in bytes."""
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(folder), *steps]
    env = os.environ | environment
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [int(line) for line in result.stdout.split()]
