"""The plan against reality, on this machine (`hardware=here`): step time and peak memory of runs of several models and
layouts.

    python benchmarks/plan.py [--steps 5] [--rounds 3] [--only TEXT] [--small] [--output plan_against_reality.png]

For each run the machine is measured as `plan=true hardware=here` does, then the run takes place: this trainer's stages,
engine and step on random weights. Both alternate, `--rounds` times, and medians are compared, since the speed of a
machine drifts. Memory is the most that is resident while training beyond what was after the imports, in a run of its
own in which freed blocks go back to the system (MALLOC_MMAP_THRESHOLD_: glibc keeps those below 32 MB otherwise, some
hundred MB), and compared where a rank needs 1 GB or more. Prints a table and draws both against their predictions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.workload import build_engine, build_llama, compose_run, repeat_batch, run_ranks

GB = 1e9
WARM_UP = 2
MODELS = {  # hidden, feed-forward, layers, heads, key-value heads, vocabulary
    "25M": (512, 1376, 6, 8, 8, 6144),
    "110M": (768, 2048, 9, 12, 12, 32000),
    "160M": (1024, 2816, 8, 16, 4, 32000),
    "270M": (1024, 2816, 18, 16, 16, 16384),
    "tiny": (64, 176, 4, 4, 4, 512),
}


@dataclass(frozen=True)
class Run:
    model: str
    pp: int
    dp: int
    micro_batch_size: int
    micro_batches: int
    seq_length: int
    checkpoint: int = 0
    precision: str = "fp32"

    @property
    def name(self) -> str:
        batch = f"{self.micro_batches} x {self.micro_batch_size} x {self.seq_length}"
        return f"{self.model} pp{self.pp} dp{self.dp} {batch} ckpt{self.checkpoint} {self.precision}"

    def config(self) -> Any:
        return compose_run(
            f"num_stages={self.pp}",
            f"micro_batch_size={self.micro_batch_size}",
            f"gradient_accumulation_steps={self.micro_batches}",
            f"max_seq_length={self.seq_length}",
            f"activation_checkpoint_interval={self.checkpoint}",
            f"precision={self.precision}",
            "data.pad_to=max_seq_length",
            "hardware=here",
            "plan=true",
            f"world_size={self.pp * self.dp}",
        )

    def architecture(self) -> Any:
        hidden, feed_forward, layers, heads, key_value_heads, vocabulary = MODELS[self.model]
        return build_llama(
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            vocab_size=vocabulary,
        )


RUNS = [
    Run("25M", 1, 1, 4, 4, 256),
    Run("25M", 2, 1, 4, 4, 256),
    Run("25M", 2, 1, 4, 16, 256, checkpoint=1),
    Run("25M", 1, 2, 2, 4, 256),
    Run("110M", 1, 1, 2, 4, 256),
    Run("110M", 2, 1, 2, 8, 256),
    Run("110M", 2, 1, 2, 4, 512, checkpoint=1),
    Run("110M", 1, 2, 2, 4, 256, checkpoint=1),
    Run("160M", 2, 1, 1, 8, 512),
    Run("160M", 1, 1, 4, 2, 256, checkpoint=2),
    Run("270M", 2, 1, 2, 4, 256),
    Run("270M", 1, 2, 1, 4, 512, checkpoint=1),
    Run("160M", 2, 1, 1, 4, 128, precision="bf16"),
    Run("110M", 1, 2, 1, 4, 128, precision="bf16"),
]
SMALL = [
    Run("tiny", 2, 1, 2, 4, 64),
    Run("tiny", 1, 2, 2, 4, 64, checkpoint=1),
    Run("tiny", 1, 1, 2, 4, 64, precision="bf16"),
]


@dataclass(frozen=True)
class Row:
    run: Run
    predicted_seconds: float
    seconds: float
    predicted_bytes: list[int]  # of each stage
    bytes: list[int]

    @property
    def time_ratio(self) -> float:
        return self.predicted_seconds / self.seconds

    @property
    def memory_ratios(self) -> list[float]:
        """Returns predicted / measured memory of the stages on which a rank needs 1 GB or more."""
        return [
            predicted / real for predicted, real in zip(self.predicted_bytes, self.bytes, strict=True) if real >= GB
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--small", action="store_true", help="three runs of seconds, to see whether all works")
    parser.add_argument("--output", type=Path, default=Path("plan_against_reality.png"))
    arguments = parser.parse_args()
    rows = []
    print("| run | step, s | predicted | ratio | peak a stage, GB | predicted | ratio |\n|---|---|---|---|---|---|---|")
    for run in SMALL if arguments.small else [run for run in RUNS if arguments.only in run.name]:
        rows.append(compare(run, arguments.rounds, arguments.steps))
        print(render_row(rows[-1]), flush=True)
    print(f"\n{summarize(rows)}")
    draw(rows, arguments.output)
    print(f"picture: {arguments.output}")


def compare(run: Run, rounds: int, steps: int) -> Row:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    peaks = [peak for _, peak in run_ranks(measure, run.pp * run.dp, run, 0)]
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    predicted, real = [], []
    for _ in range(rounds):
        predicted.append(plan(run))
        real.append(run_ranks(measure, run.pp * run.dp, run, steps))
    memories = [stage.memory for stage in predicted[0].stages]
    return Row(
        run,
        predicted_seconds=statistics.median(plan.step_seconds for plan in predicted),
        seconds=statistics.median(seconds for ranks in real for seconds in ranks[0][0]),
        predicted_bytes=[memory.peak for memory in memories],
        bytes=[max(peaks[stage * run.dp : (stage + 1) * run.dp]) for stage in range(run.pp)],
    )


def plan(run: Run) -> Any:
    from training.costs.hardware import complete_hardware
    from training.plan_command.run import ModelFolder, build_plan
    from training.resolution.resolve import resolve_model
    from training.resolution.target import Target

    config = run.config()
    machine = complete_hardware(config.hardware, config.precision, config.world_size)
    target = Target(config.world_size, has_accelerator=True, is_planned=True)
    model = resolve_model(config, ModelFolder(Path("model"), run.architecture()), target)
    return build_plan(config, model, machine)


def measure(run: Run, steps: int) -> tuple[list[float], int]:
    """Returns the seconds of each step of this rank after two warm-up steps, and its peak memory."""
    import torch.distributed as dist

    import training.run  # noqa: F401, all that a run imports, so that it does not count as the run's memory
    from training.observability.stage_timer import MemoryPeak

    config, architecture = run.config(), run.architecture()
    memory = MemoryPeak(torch.device("cpu"))
    engine = build_engine(architecture, config)
    memory.start()
    batches = repeat_batch(run.micro_batch_size, run.seq_length, architecture.vocab_size)
    seconds = []
    for step in range(WARM_UP + steps):
        dist.barrier()
        start = time.perf_counter()
        engine.train_step(batches, step, 100)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:], memory.read()


def render_row(row: Row) -> str:
    peaks, predicted = (", ".join(f"{size / GB:.2f}" for size in sizes) for sizes in (row.bytes, row.predicted_bytes))
    ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(row.predicted_bytes, row.bytes, strict=True))
    times = f"{row.seconds:.2f} | {row.predicted_seconds:.2f} | {row.time_ratio:.2f}"
    return f"| {row.run.name} | {times} | {peaks} | {predicted} | {ratios} |"


def summarize(rows: list[Row]) -> str:
    errors = {"step time": [abs(row.time_ratio - 1) for row in rows]}
    errors["peak memory from 1 GB a rank"] = [abs(ratio - 1) for row in rows for ratio in row.memory_ratios]
    return "\n".join(
        f"{name}: off by {statistics.median(values):.1%} in the median, {max(values):.1%} at worst, of {len(values)}"
        for name, values in errors.items()
        if values
    )


def draw(rows: list[Row], file: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(10, 5), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    panels = [
        (time_axes, "step, s", [(row.seconds, row.predicted_seconds) for row in rows], 0.2),
        (
            memory_axes,
            "peak memory of a rank, GB",
            [(b / GB, a / GB) for row in rows for a, b in zip(row.predicted_bytes, row.bytes)],
            0.1,
        ),
    ]
    for axes, label, points, band in panels:
        ends = min(min(p) for p in points) / 1.3, max(max(p) for p in points) * 1.3
        axes.fill_between(
            ends,
            [(1 - band) * end for end in ends],
            [(1 + band) * end for end in ends],
            color="0.9",
            label=f"within {band:.0%}",
        )
        axes.plot(ends, ends, color="0.5", linewidth=0.8)
        axes.scatter(*zip(*points), s=22, color="#4c8eda", zorder=3)
        axes.set(
            xscale="log",
            yscale="log",
            xlim=ends,
            ylim=ends,
            xlabel=f"measured {label}",
            ylabel=f"predicted {label}",
            aspect="equal",
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        axes.legend(loc="upper left", frameon=False)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
