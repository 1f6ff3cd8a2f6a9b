"""Measures what packing saves, what the loader costs, and tokenizing against a plain `datasets.map`.

    python benchmarks/data.py --file train.jsonl [--prompt_field question --completion_field answer] [--rounds 5]
    [--steps 2] [--num_proc 1 2]
        [--scale 10 200 2000 [--tokenize_up_to 200]]

One process trains the demo's small Llama on the same records in three ways that take turns in every round: packed rows,
samples padded to the longest of their global batch, and samples padded to `max_seq_length`. Rates are tokens without
padding. A global batch is 16 samples, or 4 packed rows, which is about as many tokens where a row holds four samples.
Printed are medians over the rounds of the ratios within a round. With `--scale`, sizes in MB of text: memory and start
from little text to much (benchmarks/data_scale.py), and the wait for data at the largest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.data_scale import report_scale  # noqa: E402

WAYS = {
    "packed": ("data.packing=true", "global_batch_size=4"),
    "padded to the longest": ("data.pad_to=longest", "global_batch_size=16"),
    "padded to max_seq_length": ("data.pad_to=max_seq_length", "global_batch_size=16"),
}
REFERENCE = "padded to max_seq_length"
HORIZON = 10**5  # steps; more than are run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="records with a prompt and a completion")
    parser.add_argument("--prompt_field", default="prompt")
    parser.add_argument("--completion_field", default="completion")
    parser.add_argument("--max_seq_length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps that a way takes in a round")
    parser.add_argument(
        "--num_proc", type=int, nargs="+", default=[1, 2], help="processes that tokenize; each number is measured"
    )
    parser.add_argument("--scale", type=int, nargs="+", help="MB of text, two sizes or more")
    parser.add_argument(
        "--tokenize_up_to", type=int, default=10**6, help="MB of text; the cache of more is that of less, repeated"
    )
    parser.add_argument("--only_scale", action="store_true", help="leave out the rest")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-data-") as folder:
        demo = [sys.executable, ROOT / "scripts" / "make_demo.py", "--output_dir", folder]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if not arguments.only_scale:
            report_tokenizing(
                {num_proc: measure_tokenizing(Path(folder), arguments, num_proc) for num_proc in arguments.num_proc}
            )
            report_training(measure_training(Path(folder), arguments, WAYS))
        if arguments.scale:
            largest = report_scale(build_config, Path(folder), arguments)
            ways = {"packed, the largest": (*WAYS["packed"], f"train_file={largest}")}
            report_waiting(measure_training(Path(folder), arguments, ways))


def build_config(folder: Path, arguments: argparse.Namespace, *overrides: str) -> Any:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from training.config.schema import register_schema

    register_schema()
    defaults = (
        []
        if any(override.startswith("train_file=") for override in overrides)
        else [f"train_file={os.path.abspath(arguments.file)}"]
    )
    given = [
        *defaults,
        f"model_name_or_path={folder}/model",
        f"output_dir={folder}/out",
        f"data.cache_dir={folder}/cache",
        f"data.prompt_field={arguments.prompt_field}",
        f"data.completion_field={arguments.completion_field}",
        f"max_seq_length={arguments.max_seq_length}",
        "micro_batch_size=2",
        "global_batch_size=16",
        "precision=fp32",
        "activation_checkpoint_interval=0",
        *overrides,
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_object(compose("base", given))


def measure_tokenizing(folder: Path, arguments: argparse.Namespace, num_proc: int) -> list[float]:
    """Bare time / our time, one a round, both with `num_proc` processes, from the file to a folder on disk."""
    import datasets

    from models.weights.vocabulary import open_tokenizer
    from training.inputs.datasets import prepare_file

    datasets.disable_progress_bars()
    tokenizer = open_tokenizer(folder / "model")
    fields = arguments.prompt_field, arguments.completion_field

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list]:
        prompts, completions = (tokenizer(rows[name], add_special_tokens=False)["input_ids"] for name in fields)
        return {
            "input_ids": [prompt + completion for prompt, completion in zip(prompts, completions)],
            "labels": [[-100] * len(prompt) + completion for prompt, completion in zip(prompts, completions)],
        }

    def run_bare(name: str) -> None:
        raw = datasets.Dataset.from_json(arguments.file, cache_dir=str(folder / name))
        options = {
            "batched": True,
            "remove_columns": raw.column_names,
            "new_fingerprint": name,
            "num_proc": num_proc if num_proc > 1 else None,
        }
        raw.map(tokenize, **options).save_to_disk(folder / name / "bare")

    def run_ours(name: str) -> None:
        config = build_config(folder, arguments, f"data.cache_dir={folder}/{name}", f"data.num_proc={num_proc}")
        prepare_file(config, "train_file", tokenizer, None)

    ratios = []
    for number in range(-1, arguments.rounds):  # the first round warms both up
        bare, ours = (take_time(run, f"{num_proc}_{number}{run.__name__}") for run in (run_bare, run_ours))
        if number >= 0:
            ratios.append(bare / ours)
    return ratios


def take_time(run: Callable[[str], None], name: str) -> float:
    start = time.perf_counter()
    run(name)
    return time.perf_counter() - start


@dataclass
class Way:
    """One way to place samples in rows, with its measurements."""

    step: Callable[[int], object]  # takes optimizer step n
    loader: Any
    waits: list[float]  # seconds in which the engine waited for a micro-batch
    fill: float  # the share of max_seq_length x rows that holds tokens
    steps_done: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)  # tokens a second, one a round

    def run_round(self, steps: int) -> None:
        start = time.perf_counter()
        tokens = 0
        for _ in range(steps):
            self.step(self.steps_done)
            tokens += self.loader.step_totals(self.steps_done).num_tokens
            self.steps_done += 1
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.rates.append(tokens / seconds)

    def forget(self) -> None:
        """Discards the measurements of the warm-up."""
        self.rates.clear()
        self.waits.clear()
        self.seconds = 0.0


def measure_training(
    folder: Path, arguments: argparse.Namespace, overrides: dict[str, tuple[str, ...]]
) -> dict[str, Way]:
    from training.distributed.process import join_process_group, leave_process_group
    from training.distributed.ranks import read_ranks

    ranks = read_ranks()
    join_process_group()
    ways = {name: build_way(build_config(folder, arguments, *given), ranks) for name, given in overrides.items()}
    for number in range(-1, arguments.rounds):
        for way in ways.values():
            way.run_round(arguments.steps)
            if number < 0:
                way.forget()
    leave_process_group()
    return ways


def build_way(config: Any, ranks: Any) -> Way:
    from data.storage.rows import Rows, compute_fill, count_rows
    from models.weights.sources import open_weights
    from training.build import build_engine, build_loaders
    from training.inputs.datasets import build_row_plan, load_tokenizer, tokenize
    from training.inputs.loaders import RankData
    from training.inputs.step_budget import StepBudget
    from training.setup import Run, build_setup

    setup = build_setup(config, open_weights(config.model_name_or_path), ranks)
    tokenizer = load_tokenizer(config, setup.source)
    datasets = tokenize(config, tokenizer)
    run = Run.of(setup, ranks)
    engine = build_engine(run)
    plan = build_row_plan(config, "train_file")
    budget = StepBudget(count_rows(datasets["train_file"], plan), HORIZON, HORIZON)
    loader = build_loaders(run, engine, RankData(datasets, tokenizer, setup.layout, ranks), budget).train
    waits: list[float] = []
    micro_batches = time_waiting(loader.iterate(0, HORIZON), waits)
    fill = compute_fill(Rows(datasets["train_file"], plan, False, False), plan)
    return Way(lambda step: engine.train_step(micro_batches, step, HORIZON), loader, waits, fill)


def time_waiting(micro_batches: Iterator[Any], waits: list[float]) -> Iterator[Any]:
    while True:
        start = time.perf_counter()
        batch = next(micro_batches)
        waits.append(time.perf_counter() - start)
        yield batch


def report_tokenizing(ratios: dict[int, list[float]]) -> None:
    print("| tokenizing | median | least - most |\n|---|---|---|")
    for num_proc, found in ratios.items():
        print(f"| speed / bare `datasets.map`, both with num_proc={num_proc} | {describe_ratios(found)} |")
    print()


def report_training(ways: dict[str, Way]) -> None:
    print(
        "| rows | filled | tokens/s | / padded to max_seq_length: median | least - most | share of time waiting for "
        "data |"
    )
    print("|---|---|---|---|---|---|")
    for name, way in ways.items():
        ratios = [rate / reference for rate, reference in zip(way.rates, ways[REFERENCE].rates)]
        waiting = sum(way.waits) / way.seconds
        print(
            f"| {name} | {way.fill:.1%} | {statistics.median(way.rates):,.0f} | {describe_ratios(ratios)} | "
            f"{waiting:.3%} |"
        )


def report_waiting(ways: dict[str, Way]) -> None:
    print("| rows | share of time waiting for data |\n|---|---|")
    for name, way in ways.items():
        print(f"| {name} | {sum(way.waits) / way.seconds:.3%} |")


def describe_ratios(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} | {min(ratios):.2f} - {max(ratios):.2f}"


if __name__ == "__main__":
    main()
