"""The time and the host's memory that a run states before it reads quantized weights, against those of reading them.

    python benchmarks/reading.py [--dir DIR] [--num_layers 1] [--forms fp8 int4] [--tiny]

A folder of Qwen3-235B-A22B's shape in random bytes, cut to some of its 94 layers: its routed experts in the form, 2.4
GB a layer in fp8, and in fp8 its attention too. It is read by one process, layer by layer: kept as it is, dequantized,
and quantized to nf4 (needs bitsandbytes). The files have been dropped from the page cache. Stated are the bytes at the
rate of samples of the files, and the memory of the layer that takes most; measured are the seconds, and the anonymous
memory that is added at the peak while a layer is read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.anonymous import AnonymousPeak  # noqa: E402
from benchmarks.gpu_parts.shapes import find_shape  # noqa: E402
from benchmarks.workload import build_llama, draw_parts  # noqa: E402
from models.adapters.quantized import list_held, quantize  # noqa: E402
from models.architecture.lookup import build_layers  # noqa: E402
from models.layers.frozen import count_stack_bytes  # noqa: E402
from models.layers.layer import Layer  # noqa: E402
from models.storage.folders import drop_from_memory  # noqa: E402
from models.weights.config_file import load_config  # noqa: E402
from models.weights.hugging_face_folder import HuggingFaceFolder  # noqa: E402
from models.weights.published import read_kept  # noqa: E402
from training.pipeline.reading import measure_rate  # noqa: E402

KEPT, DEQUANTIZED, NF4 = "kept", "dequantized", "to nf4"
SUFFIXES = {"fp8": ("", "_scale_inv"), "int4": ("_packed", "_scale")}
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where to work (default: the system's temporary folder)")
    parser.add_argument("--num_layers", type=int, default=1)
    parser.add_argument("--forms", nargs="+", choices=SUFFIXES, default=list(SUFFIXES))
    parser.add_argument("--tiny", action="store_true", help="small layers, to see that it works")
    arguments = parser.parse_args()
    print("| files | read | GB | stated, s | measured, s | stated, GiB | measured, GiB |")
    print("|---|---|---|---|---|---|---|")
    for form in arguments.forms:
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="benchmark-reading-") as name:
            save_folder(Path(name), form, arguments.num_layers, arguments.tiny)
            source = HuggingFaceFolder(Path(name))
            for way in (KEPT, DEQUANTIZED, NF4):
                print_row(form, way, source)


def save_folder(folder: Path, form: str, num_layers: int, tiny: bool) -> None:
    """Saves a file for each layer of the model."""
    fields: dict[str, Any] = {**find_shape(f"235b layer in {form}", tiny, 4096), "num_hidden_layers": num_layers}
    if tiny:
        fields |= {"hidden_size": 256, "moe_intermediate_size": 128}  # in whole blocks
    build_llama(**fields).save_pretrained(folder)
    files: dict[str, str] = {}
    for number, layer in enumerate(build_layers(load_config(folder)[0])):
        tensors = dict(draw_layer(layer, form))
        files |= dict.fromkeys(tensors, f"model-{number:05d}.safetensors")
        save_file(tensors, folder / f"model-{number:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    os.sync()


def draw_layer(layer: Layer, form: str) -> Iterator[tuple[str, torch.Tensor]]:
    held = list_held(layer.build_on_meta(), form)
    for name, shape in layer.shapes().items():
        for piece in layer.get_pieces(name):
            place = torch.empty(shape, device="meta")[piece.index].shape
            if name not in held:
                yield piece.hf_name, torch.zeros(place, dtype=torch.bfloat16)
                continue
            for suffix, (part,) in zip(SUFFIXES[form], draw_parts(form, (1, *place), "cpu"), strict=True):
                yield piece.hf_name + suffix, part
            if form == "int4":
                yield f"{piece.hf_name}_shape", torch.tensor(place)


def print_row(form: str, way: str, source: HuggingFaceFolder) -> None:
    files, layers = source.files(), build_layers(source.config)
    size, rate = sum(file.stat().st_size for file in files), measure_rate(drop(files))
    drop(files)
    held = peak = 0
    started = time.perf_counter()
    for number, layer in enumerate(layers):
        names = list_held(layer.build_on_meta(), form) if way == KEPT else ()
        held = max(held, count_held(source, number, replace(layer, kept=frozenset(names)), form))
        with AnonymousPeak() as memory:
            read(source, number, layer, way, names)
        peak = max(peak, memory.added)
    seconds = time.perf_counter() - started
    cells = f"{size / 1e9:.1f} | {size / rate:.1f} | {seconds:.1f} | {held / GIB:.1f} | {peak / GIB:.1f}"
    print(f"| {form} | {way} | {cells} |", flush=True)


def drop(files: Sequence[Path]) -> Sequence[Path]:
    for file in files:
        drop_from_memory(file)
    return files


def count_held(source: HuggingFaceFolder, number: int, layer: Layer, form: str) -> int:
    """Returns what a run states of one rank: the bytes of a layer that are assembled, or kept as they are."""
    module = layer.build_on_meta()
    kept = sum(count_stack_bytes(form, module.get_parameter(name).shape) for name in layer.kept)
    return source.count_held(number, layer) + kept


def read(source: HuggingFaceFolder, number: int, layer: Layer, way: str, names: Sequence[str]) -> None:
    """Reads a layer as a rank does; what was read is freed."""
    kept = read_kept(source, layer, names, torch.bfloat16)
    tensors = source.read_layer(number, replace(layer, kept=frozenset(kept)))
    if way == NF4 and tensors:
        module = layer.build_on_meta()
        module.load_state_dict(tensors, strict=False, assign=True)
        tensors.clear()
        quantize(module, list_held(module, "nf4"))


if __name__ == "__main__":
    main()
