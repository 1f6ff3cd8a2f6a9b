"""The loaders of engines on this project's exports of adapters: what of a release's own code makes of them, on a CPU.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    python benchmarks/engines.py vllm-*.whl sglang-*.whl [--output benchmarks/results/engines.md]

For each class of models with experts, a small model gets an adapter, which is exported and brought into the engine's
form (`convert2ckpt.py --engine`). The engine's code then parses, stacks and copies it into the tensors that its kernels
read; these are held against the tensors that the trained layer multiplies with, bit for bit. Folders with a mistake
follow: what the engine does, and what `scripts/check_adapter.py` says. Of each wheel the modules named in the report
are its own, and all others empty (`engines_parts/stand_ins.py`): no kernel runs, and what a class of models does
around its experts is read from its source.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engines_parts.exports import Trained, export_trained
from benchmarks.engines_parts.sglang_loader import SglangLoader
from benchmarks.engines_parts.stand_ins import unpack_sources
from benchmarks.engines_parts.vllm_loader import VllmLoader
from models.adapters.engine_check import check_adapter, count_problems, read_dimensions
from models.adapters.engines import ENGINES, MODEL_CLASSES, Form
from models.adapters.stacks import exchange
from models.conversion.engine_adapter import export_for_engine

Buffers = dict[str, dict[str, torch.Tensor]]
Tensors = dict[str, torch.Tensor]
DAMAGED = (
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
)  # classes of which folders with a mistake are tried, one of a form
LOADERS: dict[str, Any] = {"vllm": VllmLoader, "sglang": SglangLoader}
MAX_RANK = 16


@dataclass(frozen=True)
class Row:
    """One line of the report. result: what the engine did. check: what `check_adapter` says."""

    engine: str
    class_name: str
    what: str
    result: str
    check: str
    is_right: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="of vllm, sglang, or both")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the report is written; by default printed")
    args = parser.parse_args()
    rows, sources = [], []
    with tempfile.TemporaryDirectory() as work:
        for wheel in args.wheels:
            engine = wheel.name.split("-")[0]
            release = unpack_sources(wheel, Path(work) / engine)
            loader = LOADERS[engine](Path(work) / engine)
            sources.append(f"{engine} {release}: {', '.join(f'`{name}`' for name in loader.modules)}")
            if release != ENGINES[engine].release:
                print(f"the table is of {engine} {ENGINES[engine].release}, the wheel of {release}", file=sys.stderr)
            rows += list(run_engine(engine, loader, Path(work) / f"{engine}-folders"))
    report = render(rows, sources)
    if args.output is None:
        print(report, end="")
    else:
        args.output.write_text(report)
    sys.exit(0 if all(row.is_right for row in rows) else 1)


def run_engine(engine: str, loader: Any, work: Path) -> Iterator[Row]:
    """Yield the rows of one engine: exports first, then folders with a mistake."""
    for class_name, model_class in MODEL_CLASSES.items():
        folder = work / class_name
        folder.mkdir(parents=True)
        for what, options in ADAPTERS.items():
            trained = export_trained(folder / what.replace(" ", "_"), model_class.model_type, **options)
            served = trained.folder.with_name(engine)
            export_for_engine(str(trained.folder), served, engine)
            yield judge_export(engine, loader, class_name, what, trained, served)
        if class_name not in DAMAGED:
            continue
        trained = export_trained(folder / "broken", model_class.model_type)
        served = trained.folder.with_name(engine)
        export_for_engine(str(trained.folder), served, engine)
        yield judge_folder(engine, loader, class_name, "as peft writes it", trained, trained.folder)
        for what, damage in DAMAGES.items():
            broken = served.with_name(f"{engine}-{what.replace(' ', '_')}")
            shutil.copytree(served, broken)
            if damage(broken, class_name, engine):
                yield judge_folder(engine, loader, class_name, what, trained, broken)


ADAPTERS: dict[str, dict[str, Any]] = {
    "all projections and experts": {},
    "rank-stabilized": {"use_rslora": True, "lora_alpha": 8},
    "down_proj of the experts alone": {"target_parameters": ["mlp.experts.down_proj"]},
    "gate_up_proj of the experts alone": {"target_parameters": ["mlp.experts.gate_up_proj"]},
}


def judge_export(engine: str, loader: Any, class_name: str, what: str, trained: Trained, served: Path) -> Row:
    """Return the row of an export that has to load: right if each tensor is the trained layer's, bit for bit."""
    check = describe_check(served, engine, class_name, trained)
    try:
        buffers = loader.load(served, class_name, trained.config, MAX_RANK)
    except Exception as error:  # of the engine, whatever it is
        return Row(engine, class_name, what, describe_error(error, served), check, False)
    differing = find_differing(engine, class_name, trained, buffers)
    count = sum(len(tensors) for tensors in buffers.values())
    result = f"{len(differing)} of {count} tensors differ" if differing else f"{count} tensors, bit for bit"
    return Row(engine, class_name, what, result, check, not differing and check == "taken")


def judge_folder(engine: str, loader: Any, class_name: str, what: str, trained: Trained, folder: Path) -> Row:
    """Return the row of a folder that may be wrong: right if `check_adapter` finds a problem where the engine refuses
    the folder or serves something else than was trained, and only there."""
    check = describe_check(folder, engine, class_name, trained)
    try:
        buffers = loader.load(folder, class_name, trained.config, MAX_RANK)
    except Exception as error:  # of the engine, whatever it is
        return Row(engine, class_name, what, describe_error(error, folder), check, check != "taken")
    differing = find_differing(engine, class_name, trained, buffers)
    result = f"loads, {len(differing)} tensors are not the trained ones" if differing else "loads the trained tensors"
    return Row(engine, class_name, what, result, check, (check != "taken") == bool(differing))


def describe_error(error: Exception, folder: Path) -> str:
    text = " ".join(str(error).replace(str(folder), "FOLDER").split()).partition(" in {")[0]
    return f"{type(error).__name__}: {text[:150]}" if text else type(error).__name__


def describe_check(folder: Path, engine: str, class_name: str, trained: Trained) -> str:
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    fields = json.loads((folder / "adapter_config.json").read_text())
    dimensions = read_dimensions(trained.config.to_dict())
    assert dimensions is not None
    problems = count_problems(check_adapter(shapes, fields, engine, class_name, dimensions))
    return ", ".join(f"{count} {problem}" for problem, count in sorted(problems.items())) or "taken"


def find_differing(engine: str, class_name: str, trained: Trained, buffers: Buffers) -> list[str]:
    """Return the tensors of the engine's experts that are not those of the trained layer."""
    differing = []
    for module, tensors in buffers.items():
        layer = int(module.split(".")[2])
        expected = build_expected(engine, class_name, trained, layer, tensors)
        differing += [f"{module}.{name}" for name in tensors if not torch.equal(tensors[name], expected[name])]
    return differing


def build_expected(engine: str, class_name: str, trained: Trained, layer: int, buffers: Tensors) -> Tensors:
    """Return the tensors that the engine's kernels have to read for a layer: its own factors, zeros where it has none,
    and zeros above its rank."""
    expected = {name: torch.zeros_like(tensor) for name, tensor in buffers.items()}
    for stack, (first, second) in ((s, f) for (number, s), f in trained.factors.items() if number == layer):
        rank, second = first.shape[1], second.transpose(1, 2)  # [E, out, r]
        if engine == "sglang":
            matrix = f"{stack}_moe"
            for start in (0, MAX_RANK) if stack == "gate_up_proj" else (0,):  # A of gate and of up
                expected[f"{matrix}.A"][:, start : start + rank] = first
            expected[f"{matrix}.B"][..., :rank] = second
            continue
        name = "w2" if stack == "down_proj" else "w13"
        halves = [second]
        if name == "w13" and ENGINES[engine].forms[class_name] is Form.pairs:
            halves = list(second.chunk(2, dim=1))
        for index, half in enumerate(halves):
            expected[f"{name}_lora_a[{index}]"][:, :rank] = first
            expected[f"{name}_lora_b[{index}]"][..., :rank] = half
    return expected


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> bool:
    """Return whether the change has changed a name, a shape or a number of tensors."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    changed = change(dict(tensors))
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, file, metadata={"format": "pt"})
    return {n: t.shape for n, t in changed.items()} != {n: t.shape for n, t in tensors.items()}


def change_fields(folder: Path, **fields: Any) -> bool:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return True


def _exchange_stacks(folder: Path, class_name: str, engine: str) -> bool:
    def change(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if ".experts" in name and name.endswith("lora_A.weight")]:
            other = name.replace("lora_A", "lora_B")
            tensors[name], tensors[other] = exchange(tensors[name], tensors[other], 6)
        return tensors

    return ENGINES[engine].forms[class_name] is Form.stacked and change_tensors(folder, change)


def _transpose_pairs(folder: Path, class_name: str, engine: str) -> bool:
    def change(tensors: Tensors) -> Tensors:
        return {name: tensor.T if ".experts." in name else tensor for name, tensor in tensors.items()}

    return ENGINES[engine].forms[class_name] is Form.pairs and change_tensors(folder, change)


def _rename(old: str, new: str) -> Callable[[Path, str, str], bool]:
    def damage(folder: Path, class_name: str, engine: str) -> bool:
        return change_tensors(folder, lambda tensors: {name.replace(old, new): t for name, t in tensors.items()})

    return damage


def _drop(ending: str) -> Callable[[Path, str, str], bool]:
    def damage(folder: Path, class_name: str, engine: str) -> bool:
        return change_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(ending)})

    return damage


def _drop_stack(folder: Path, class_name: str, engine: str) -> bool:
    """Without the pair of down_proj of a class that is stacked."""
    if ENGINES[engine].forms[class_name] is not Form.stacked:
        return False
    return change_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if ".experts.lora_" not in n})


DAMAGES: dict[str, Callable[[Path, str, str], bool]] = {
    "exchanged stacks": _exchange_stacks,
    "transposed pairs": _transpose_pairs,
    "experts under another block": _rename(".experts.", ".routed_experts."),
    "without model": _rename("base_model.model.model.", "base_model.model."),
    "one expert's down projection missing": lambda folder, class_name, engine: _drop(
        f"experts.3.{MODEL_CLASSES[class_name].names[2]}.lora_A.weight"
    )(folder, class_name, engine),
    "down_proj missing": _drop_stack,
    "DoRA": lambda folder, class_name, engine: change_fields(folder, use_dora=True),
    "rank above the largest limit": lambda folder, class_name, engine: (
        engine == "vllm" and change_fields(folder, r=1024)
    ),
    "modules_to_save": lambda folder, class_name, engine: (
        engine == "vllm" and change_fields(folder, modules_to_save=["lm_head"])
    ),
    "PiSSA": lambda folder, class_name, engine: engine == "vllm" and change_fields(folder, init_lora_weights="pissa"),
}


def render(rows: list[Row], sources: list[str]) -> str:
    lines = [
        "# Adapters of experts in the loaders of engines",
        "",
        "Written by `python benchmarks/engines.py`, on CPUs: no kernel has run. These modules are the wheels' own, all",
        "others are empty:",
        "",
        *(f"- {source}" for source in sources),
        "",
        "Small models of each class, 6 experts, rank 4. Bit for bit: what the engine's kernels would read is what the",
        "trained layer multiplies with. `check_adapter` is held against the engine: it has to find a problem where the",
        "engine refuses a folder or serves something else, and only there.",
        "",
        "| engine | class | adapter | the engine | `check_adapter` | |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.engine} | {row.class_name} | {row.what} | {row.result.replace('|', '/')} | {row.check} | "
            f"{'right' if row.is_right else 'WRONG'} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
