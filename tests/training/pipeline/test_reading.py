"""The cost of reading weights: memory of hosts, bytes, and the rate of files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.families import save_family
from support.quantized import save_fp8, save_int4, save_mxfp4

from models.architecture.lookup import build_layers
from models.weights.edits import Edit, EditedWeights
from models.weights.sources import open_weights
from training.pipeline import reading
from training.pipeline.reading import Share, count_read, find_lack, measure_rate

GIB = 2**30
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def test_ranks_of_a_host_share_its_memory() -> None:
    shares = [Share("a", {}, 3 * GIB, 7 * GIB), Share("a", {}, 4 * GIB, 8 * GIB), Share("b", {}, GIB, GIB)]
    assert find_lack(shares) is None
    error = find_lack([*shares, Share("b", {}, 1, GIB)])
    assert "takes 1.0 GiB of memory on b, and 1.0 GiB are available; free some, or start fewer ranks" in str(error)


def test_a_layer_is_read_once_on_a_host() -> None:
    stages = [{0: 10, 1: 30}, {2: 30, 3: 10}]
    one_host = [Share("a", layers, 0, 0) for layers in stages * 2]  # two replicas
    assert count_read(one_host, 800) == 800
    uneven = [*one_host[:1], *(replace(share, host="b") for share in (one_host[1], Share("b", {1: 30}, 0, 0)))]
    assert count_read(uneven, 800) == 800 * 70 / 80


def test_samples_are_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate that a clock of ours makes one second long."""
    files = [tmp_path / name for name in "abc"]
    for file, size in zip(files, (5, 0, 27), strict=True):
        file.write_bytes(bytes(size))
    clock = iter((1.0, 2.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(reading, "_SAMPLE_BYTES", 2)
    assert measure_rate(files) == 16 * 2 - 1  # of the first file's last byte alone


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4, save_int4])
def test_what_is_assembled_or_dequantized_is_held(save: Callable[[Path], object], tmp_path: Path) -> None:
    save(tmp_path)
    source = open_weights(str(tmp_path))
    layer = replace(build_layers(source.config)[4], experts=dict.fromkeys(STACKS, range(2, 6)))
    read = source.read_layer(4, layer)
    whole = sum(tensor.nbytes for tensor in read.values())
    others = sum(tensor.nbytes for name, tensor in read.items() if name not in STACKS)
    is_packed = save is save_mxfp4  # then a layer's experts are unpacked first
    assert source.count_held(4, layer) == (whole if is_packed else others + (whole - others) // 2)
    assert source.count_held(4, replace(layer, kept=frozenset(STACKS))) == others
    assert EditedWeights(source, Edit()).count_held(4, layer) == source.count_held(4, layer)


def test_what_is_mapped_takes_nothing(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    source = open_weights(str(tmp_path))
    assert source.count_held(1, build_layers(source.config)[1]) == 0
