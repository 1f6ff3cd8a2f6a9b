"""The converter's anonymous memory, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from support.model_folders import save_source

ROOT = Path(__file__).resolve().parents[3]
MEMORY_SCRIPT = """
import re, sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from models import llama  # imports are not measured
from models.weights.conversion import convert_to_pipeline, export_hugging_face
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

start = anonymous()
threading.Thread(target=watch, daemon=True).start()
for source, output, go, dtype in (
    ("hf", "pipeline", convert_to_pipeline, None),
    ("pipeline", "back", export_hugging_face, None),
    ("hf", "wide", convert_to_pipeline, torch.float32),
    ("wide", "narrow", export_hugging_face, torch.bfloat16),
):
    peak = 0
    go(open_weights(str(root / source)), root / output, dtype=dtype)
    print(peak - start)
stop = True
"""


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
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    peaks = [int(line) for line in result.stdout.split()]
    largest = (4 * 512**2 + 3 * 512 * 3072 + 2 * 512) * 2  # bytes of a decoder layer in bf16
    for peak, bound in zip(peaks, (2 * largest, 2 * largest, 2 * 2 * largest, 2 * 2 * largest), strict=True):
        assert peak < bound, (peaks, largest)
