"""Exports are read by transformers 4 too: what it computes from them, installed in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import make_adapter
from support.cases import relative_difference
from support.families import save_family
from support.model_folders import convert, export
from transformers import AutoModelForCausalLM

from models.conversion.model_files import write_json
from models.weights.config_file import describe_config
from models.weights.sources import open_weights

VERSION = "4.57.6"
PACKAGES = (f"transformers=={VERSION}", "tokenizers>=0.22,<=0.23.0", "huggingface-hub>=0.34,<1.0")
BOUND = 1e-5
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# family -> fields in addition to those of the tests: rotary positions of each type
SCALED: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 16}},
    "mistral": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "qwen3": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0}},
    "gemma2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "phi3": {},  # longrope
    "deepseek_v3": {},  # yarn
    "gpt_oss": {},  # yarn
}
COMPUTE = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM
assert transformers.__version__ == sys.argv[1]
load = AutoModelForCausalLM.from_pretrained
with torch.no_grad():
    models = [load(folder, torch_dtype="auto", attn_implementation="eager") for folder in sys.argv[3:]]
    torch.save([model(torch.arange(3, 43)[None]).logits for model in models], sys.argv[2])
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of packages with transformers 4; what it needs besides is that of this environment."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        pytest.skip(f"transformers {VERSION} cannot be installed: {(result.stderr.splitlines() or [''])[-1]}")
    return folder


@torch.no_grad()
def compute(folder: Path) -> torch.Tensor:
    """The logits of a folder in this version of transformers."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model(torch.arange(3, 43)[None]).logits


@pytest.mark.full
def test_exports_and_merged_adapters_give_the_logits_of_the_source_in_transformers_4_and_5(
    older: Path, tmp_path: Path
) -> None:
    exports, expected = [], []
    for family, fields in SCALED.items():
        folder = tmp_path / family
        source = save_family(folder / "source", family, **fields)
        pipeline = convert(source, folder / "pipeline")
        write_json(describe_config(source, open_weights(str(source)).config), pipeline / "config.json")  # as a run does
        adapted = make_adapter(folder / "adapter", source, ["qkv_proj" if family == "phi3" else "o_proj"])
        adapted.get_base_model().set_attn_implementation("eager")
        with torch.no_grad():
            expected += [compute(source), adapted.eval()(torch.arange(3, 43)[None]).logits]
        exports += [export(pipeline, folder / "export"), export(folder / "adapter", folder / "merged")]
    command = [sys.executable, "-c", COMPUTE, VERSION, str(tmp_path / "logits.pt"), *map(str, exports)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(older)}, check=True, timeout=300)
    for folder, logits, found in zip(exports, expected, torch.load(tmp_path / "logits.pt"), strict=True):
        for each in (found, compute(folder)):
            assert relative_difference(each, logits) < BOUND, folder
