"""The parity table of docs/parity.md: every family through real pipeline stages against the plain Hugging Face model,
as figures.

    make parity            (python tests/support/parity_table.py --output docs/parity.md)

Each figure is the relative difference, max|a - b| / max|b|, of the worst tensor, in fp32. A gradient is read off one
SGD step with a learning rate so large that the new weight is the gradient. The tests run a subset of this
(test_family_parity.py, test_lora.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/training")]

import torch  # noqa: E402
from support.adapters import make_adapter, to_peft_weights  # noqa: E402
from support.cases import Case, build_engine, merge, relative_difference, train_case, train_oracle, worst_difference  # noqa: E402
from support.families import FAMILIES, MIXTURES, OTHERS, has_sharding_plan, save_family  # noqa: E402
from support.router_runs import train_router_oracle  # noqa: E402
from support.tiny import VOCAB_SIZE, save_records, save_tokenizer  # noqa: E402
from support.workers import WorkerGroup  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from batch import Batch, Inputs, Targets  # noqa: E402

LAYOUTS = {  # stages, ranks, tensor_parallel_size
    "pp1": (1, 1, 1),
    "pp2": (2, 2, 1),
    "pp4": (4, 4, 1),
    "tp2": (1, 2, 2),
    "tp2xpp2": (2, 4, 2),
    "tp2xdp2": (1, 4, 2),
}
BOUND = 1e-5
NUM_SAMPLES = 22
LARGE = 2.0**20  # next to it the weights of a tiny model vanish
SGD_STEPS = ("learning_rate=0.05", "max_grad_norm=0.05")
COLUMNS = (
    "logits",
    "gradients",
    "5 steps",
    "5 steps, checkpointed",
    "packed gradients",
    "LoRA, 5 steps",
    "gradients, router losses",
)
AUX, Z = 0.5, 0.02
# Families without a file that run at every layout, the others at pp2, and at tp2 where they are dense
OF_EACH_KIND = ("mixtral", "glm4_moe", "gemma3_text", "gpt_neox", "falcon", "bloom")


def list_rows(family: str, layouts: Sequence[str]) -> list[tuple[bool, str]]:
    """(tied, layout) of a family's rows."""
    if family in MIXTURES:
        return [(False, layout) for layout in layouts if layout == "pp2" or family in OF_EACH_KIND]
    shown = [name for name in layouts if LAYOUTS[name][2] == 1 or has_sharding_plan(family)]
    if family in OTHERS:
        return [(False, layout) for layout in shown if layout in ("pp2", "tp2") or family in OF_EACH_KIND]
    return [(tied, layout) for tied in (False, True) for layout in shown]


def logits_on_rank(case: Case, input_ids: torch.Tensor) -> torch.Tensor | None:
    """Logits [B, T, V] of the pipeline, on the ranks that have the loss; with tensor parallelism, those of the
    rank's tokens."""
    engine, *_ = build_engine(case)
    position_ids = torch.arange(input_ids.shape[1]).repeat(len(input_ids), 1)
    segment_ids = torch.ones_like(input_ids, dtype=torch.int32)
    batch = Batch(Inputs(input_ids, position_ids, segment_ids), Targets.find(input_ids, torch.tensor(1.0)))
    needs_data = engine.module.has_first_layer or engine.module.has_loss
    found = engine.forward_only(iter([batch]) if needs_data else None, 1, loss=lambda outputs, _: F.linear(*outputs))
    if not found:
        return None
    logits = found[0]
    cap = getattr(engine.module._source.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


class ByFp64(float):
    """A figure against the oracle in fp64, which the page marks."""


class Table:
    """Measures row after row. Models, oracles and groups of workers are made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._groups: dict[int, WorkerGroup] = {}
        self.records = save_records(root / "train.jsonl", NUM_SAMPLES)
        save_tokenizer(root / "tokenizer")

    def run(self, case: Case, function: Callable[..., Any] = train_case, *arguments: Any) -> list[Any]:
        group = self._groups.setdefault(case.world_size, WorkerGroup(case.world_size, self.root))
        return group.run(function, case, *arguments)

    def close(self) -> None:
        """Ends the workers; an exit would wait for them, and they for another case."""
        for group in self._groups.values():
            group.close()

    def measure(self, family: str, tied: bool, layout: str) -> list[float | None]:
        """The figures of one row, in the order of COLUMNS; None for routers of a dense model."""
        folder = self.model(family, tied)
        case = lambda *overrides, steps=5: self.case(folder, layout, *overrides, steps=steps)  # noqa: E731
        gradient = (f"learning_rate={LARGE}", "max_grad_norm=0")
        whole = (*gradient, "micro_batch_size=1", f"global_batch_size={NUM_SAMPLES}")
        adapted = (
            "adapter=lora",
            f"adapter.name_or_path={self.adapter(family, tied)[0]}",
            "activation_checkpoint_interval=1",
            "learning_rate=0.05",
        )
        packed = self.run_packed(case, gradient)
        return [
            self.compare_logits(case(steps=1), folder),
            self.compare(merge(self.run(case(*gradient, steps=1))), self.oracle(folder, 1, gradient)),
            self.compare_steps(merge(self.run(case(*SGD_STEPS))), folder),
            self.compare_steps(merge(self.run(case(*SGD_STEPS, "activation_checkpoint_interval=1"))), folder),
            self.compare(packed, self.oracle(folder, 1, whole)),
            self.compare_adapters(merge(self.run(case(*adapted))), family, tied, adapted),
            self.compare_routers(family, folder, layout, gradient),
        ]

    def case(self, folder: Path, layout: str, *overrides: str, steps: int) -> Case:
        num_stages, world_size, width = LAYOUTS[layout]
        given = (f"tokenizer_name_or_path={self.root}/tokenizer", f"tensor_parallel_size={width}", *overrides)
        return Case(folder, self.records, self.root, num_stages, world_size, steps, given)

    def run_packed(self, case: Callable[..., Case], gradient: tuple[str, ...]) -> dict[str, Any]:
        """Runs one step on all samples, packed; the number of rows is known after tokenizing."""
        rows = self.run(case("data.packing=true"), count_packed_rows)[0]
        return merge(
            self.run(case(*gradient, "data.packing=true", "micro_batch_size=1", f"global_batch_size={rows}", steps=1))
        )

    def compare_logits(self, case: Case, folder: Path) -> float:
        input_ids = torch.randint(3, VOCAB_SIZE, (3, 40), generator=torch.Generator().manual_seed(1))
        width = case.config().tensor_parallel_size
        found = [result for result in self.run(case, logits_on_rank, input_ids) if result is not None]
        logits = torch.cat(found[:width], dim=-1)
        with torch.no_grad():
            return relative_difference(
                logits, AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids, use_cache=False).logits
            )

    def compare(self, result: dict[str, Any], oracle: dict[str, Any]) -> float:
        trained = {name: tensor for name, tensor in oracle["weights"].items() if name in result["weights"]}
        assert trained.keys() == result["weights"].keys()
        return worst_difference(result["weights"], trained)[0]

    def compare_steps(self, result: dict[str, Any], folder: Path) -> float:
        """Where two experts are so nearly tied that the rounding of fp32 decides between them, fp64 says which is
        right: the other one changes the weights by far more than a rounding."""
        figure = self.compare(result, self.oracle(folder, 5, SGD_STEPS))
        if figure < BOUND or not is_mixture(folder):
            return figure
        return ByFp64(self.compare(result, self.exact_oracle(folder, 5, SGD_STEPS)))

    def compare_adapters(self, result: dict[str, Any], family: str, tied: bool, overrides: tuple[str, ...]) -> float:
        trained, expected = to_peft_weights(
            result, self.adapter_oracle(family, tied, overrides), self.adapter(family, tied)[1].config
        )
        return worst_difference(trained, expected)[0]

    def compare_routers(self, family: str, folder: Path, layout: str, gradient: tuple[str, ...]) -> float | None:
        if not is_mixture(folder):
            return None
        switched_on = (f"moe.aux_loss_coef={AUX}", f"moe.z_loss_coef={Z}")
        result = merge(self.run(self.case(folder, layout, *gradient, *switched_on, steps=1)))
        return self.compare(result, self.router_oracle(family, folder, gradient))

    @cache
    def router_oracle(self, family: str, folder: Path, gradient: tuple[str, ...]) -> dict[str, Any]:
        return train_router_oracle(self.case(folder, "pp1", *gradient, steps=1), family, aux=AUX, z=Z)

    @cache
    def model(self, family: str, tied: bool) -> Path:
        return save_family(self.root / f"{family}-{tied}", family, tied=tied)

    @cache
    def adapter(self, family: str, tied: bool) -> tuple[Path, Any]:
        folder = self.root / f"{family}-{tied}-adapter"
        return folder, make_adapter(folder, self.model(family, tied))

    @cache
    def oracle(self, folder: Path, steps: int, overrides: tuple[str, ...]) -> dict[str, Any]:
        return train_oracle(self.case(folder, "pp1", *overrides, steps=steps))

    @cache
    def exact_oracle(self, folder: Path, steps: int, overrides: tuple[str, ...]) -> dict[str, Any]:
        """In fp64, for which grouped products are missing."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        return train_oracle(self.case(folder, "pp1", *overrides, steps=steps), model)

    @cache
    def adapter_oracle(self, family: str, tied: bool, overrides: tuple[str, ...]) -> dict[str, Any]:
        return train_oracle(
            self.case(self.model(family, tied), "pp1", *overrides, steps=5), self.adapter(family, tied)[1]
        )


def is_mixture(folder: Path) -> bool:
    return bool(getattr(AutoConfig.from_pretrained(folder), "num_experts_per_tok", None))


def count_packed_rows(case: Case) -> int:
    from transformers import AutoTokenizer

    from data.storage.rows import Rows
    from training.inputs.datasets import build_row_plan, prepare_file

    config = case.config()
    path = prepare_file(config, "train_file", AutoTokenizer.from_pretrained(config.tokenizer_name_or_path), print)
    return len(Rows(path, build_row_plan(config, "train_file"), True, True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the table, in addition to the terminal")
    every_family = sorted(FAMILIES) + sorted(MIXTURES) + sorted(OTHERS)
    parser.add_argument("--families", nargs="+", default=every_family, choices=every_family)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments = parser.parse_args()
    lines = ["| family | head | layout | " + " | ".join(COLUMNS) + " |", "|---" * (3 + len(COLUMNS)) + "|"]
    worst = 0.0
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as root:
        table = Table(Path(root))
        for family in arguments.families:
            for tied, layout in list_rows(family, arguments.layouts):
                figures = table.measure(family, tied, layout)
                worst = max(worst, *(figure for figure in figures if figure is not None))
                shown = ["-" if figure is None else show(figure) for figure in figures]
                lines.append(f"| {family} | {'tied' if tied else 'own'} | {layout} | " + " | ".join(shown) + " |")
                print(lines[-1], flush=True)
        table.close()
    if arguments.output is not None:
        arguments.output.write_text(render_page(lines, worst))
    print(f"worst: {worst:.1e}, bound {BOUND:.0e}")
    sys.exit(worst >= BOUND)


def show(figure: float) -> str:
    return f"{figure:.1e}" + ("*" if isinstance(figure, ByFp64) else "")


def render_page(lines: list[str], worst: float) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "deepspeed", "transformers", "peft"))
    return (
        f"""# Parity with Hugging Face

Made by `make parity`: tiny random models of every family with every feature of the family switched on
(`tests/support/families.py`), through real pipeline stages, against the plain Hugging Face model in one process. A
figure is the relative difference max|a - b| / max|b| of the worst tensor, in fp32; worst of all: {worst:.1e}.

tp2: each layer on two ranks (docs/tensor_parallelism.md); xpp2, xdp2: and two stages, or two replicas.

- *logits*: of a batch in evaluation. *gradients*: every one of them, of a global batch of 8 samples of different
  lengths, padded on the right.
- *5 steps*: every weight after 5 SGD steps with clipping that bites, without and with activation checkpointing. With a
  star: against Hugging Face in fp64. There two experts are so nearly tied that one process in fp32 itself takes another
  one than fp64 does.
- *packed gradients*: samples packed into rows, against each document in a row of its own.
- *LoRA*: every adapter matrix after 5 SGD steps, against peft on the Hugging Face model; on experts too.
- *router losses*: every gradient with `moe.aux_loss_coef` and `moe.z_loss_coef` on, against the same losses of each
  document run alone. A dash: a model without routers.

{versions}; CPU, gloo.

"""
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
