"""Memory and start of the data, from little text to much. `benchmarks/data.py --scale 10 2000` runs it.

Each size is a file of that many MB of text, made of the given records. What is measured is measured in a process of its
own: tokenizing it with two processes, and then the loaders of a first, a middle and a last stage, packed, which start
from the cache as a run does. Memory is anonymous (RssAnon): what lies mapped from files is the kernel's to take back. A
size beyond `--tokenize_up_to` gets a cache of that size that repeats the tokens of a smaller one, and a file of holes;
all that follows is the real thing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

MB = 10**6
STAGES = {"first": (True, False), "middle": (False, False), "last": (False, True)}  # reads inputs, reads labels
MICRO_BATCHES = 200
INTERVAL = 0.02  # seconds between two looks at the memory

BuildConfig = Callable[..., Any]


@dataclass(frozen=True)
class Tokenized:
    seconds: float
    main: float  # peak of RssAnon, bytes
    worker: float  # the largest of the workers


@dataclass(frozen=True)
class Loaded:
    start: float  # seconds from knowing the config to the first micro-batch
    memory: float  # anonymous, bytes, of all that; after MICRO_BATCHES of them
    micro_batch: float  # seconds


def report_scale(build_config: BuildConfig, folder: Path, arguments: argparse.Namespace) -> Path:
    """Prints the table; returns the file of the largest size, whose cache is there."""
    sizes = sorted(arguments.scale)
    files = {size: folder / f"{size}.jsonl" for size in sizes}
    measured: dict[int, tuple[Tokenized | None, int, dict[str, Loaded]]] = {}
    tokenized_of: int | None = None
    for size, file in files.items():
        config = partial(build_config, folder, arguments, f"train_file={file}", "data.num_proc=2", "data.packing=true")
        tokenized = None
        if size <= arguments.tokenize_up_to:
            write_text(Path(arguments.file), file, size * MB)
            tokenized, tokenized_of = alone(measure_tokenizing, config), size
        else:
            if tokenized_of is None:
                raise SystemExit("the smallest size of --scale must be tokenized; raise --tokenize_up_to")
            with open(file, "wb") as holes:
                holes.truncate(size * MB)
            alone(
                repeat_cache,
                partial(build_config, folder, arguments, f"train_file={files[tokenized_of]}"),
                config,
                size / tokenized_of,
            )
        stages = {name: alone(measure_loader, config, *reads) for name, reads in STAGES.items()}
        measured[size] = tokenized, alone(count_token_bytes, config), stages
    print_table(measured)
    return files[sizes[-1]]


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def write_text(source: Path, file: Path, num_bytes: int) -> None:
    """The records of `source` again and again, each a text of its own."""
    records = [json.loads(line) for line in source.read_text().splitlines()]
    written = round_ = 0
    with open(file, "w") as out:
        while written < num_bytes:
            for record in records:
                line = (
                    json.dumps(
                        {name: f"{text} {round_}" if isinstance(text, str) else text for name, text in record.items()}
                    )
                    + "\n"
                )
                out.write(line)
                written += len(line)
                if written >= num_bytes:
                    break
            round_ += 1


def repeat_cache(config_of: Callable[[], Any], config_to: Callable[[], Any], times: float) -> None:
    """Makes the cache of `config_to`: that of `config_of`, `times` over, as the tokenizer would have written it."""
    from dataclasses import replace

    import numpy as np

    from data.storage.tokenized import TokenizedDataset, TokenizedWriter, load_summary

    source, path = (find_cache(build()) for build in (config_of, config_to))
    data = TokenizedDataset(source, True, True)
    columns = {
        "input_ids": data._columns["input_ids"],
        "labels": data._columns["labels"],
        "length": data.lengths,
        "num_targets": data.num_targets,
    }
    path.mkdir(parents=True)
    with TokenizedWriter(path, 1) as writer:
        for _ in range(round(times)):
            writer.append({name: np.ascontiguousarray(values) for name, values in columns.items()}, 0)
        counts = {name: getattr(writer, name) for name in ("num_samples", "num_tokens", "num_targets")}
        writer.finish(replace(load_summary(source), num_records=writer.num_samples, **counts))
    prepare(config_to())


def find_cache(config: Any) -> Path:
    from data.storage.encoding import Encoding
    from training.inputs.datasets import build_encoder

    encoding = Encoding(build_encoder(config.data), load_tokenizer(config), config.max_seq_length)
    return Path(config.data.cache_dir) / encoding.compute_key([[config.train_file]])


def load_tokenizer(config: Any) -> Any:
    from models.weights.vocabulary import open_tokenizer

    return open_tokenizer(config.model_name_or_path)


def prepare(config: Any, tokenizer: Any = None) -> Path:
    from training.inputs.datasets import prepare_file

    return prepare_file(config, "train_file", tokenizer or load_tokenizer(config), None)


def measure_tokenizing(build: Callable[[], Any]) -> Tokenized:
    config = build()
    tokenizer = load_tokenizer(config)
    with Peaks() as peaks:
        start = time.perf_counter()
        prepare(config, tokenizer)
        seconds = time.perf_counter() - start
    return Tokenized(seconds, peaks.own, peaks.children)


def measure_loader(build: Callable[[], Any], reads_inputs: bool, reads_labels: bool) -> Loaded:
    from data.loading.loader import LoaderOptions, build_train_loader
    from data.order import GlobalOrder
    from data.storage.rows import count_rows
    from training.inputs.datasets import build_row_plan

    config = build()
    tokenizer = load_tokenizer(config)
    before, start = read_anonymous(psutil.Process().pid), time.perf_counter()
    path = prepare(config, tokenizer)
    plan = build_row_plan(config, "train_file")
    order = GlobalOrder(count_rows(path, plan), config.global_batch_size, config.seed)
    options = LoaderOptions(reads_inputs, reads_labels, 0, 1, config.micro_batch_size, plan, pad_token_id=0)
    loader = build_train_loader(path, options, order, config.global_batch_size // config.micro_batch_size)
    if options.reads_nothing:
        return Loaded(time.perf_counter() - start, read_anonymous(psutil.Process().pid) - before, 0.0)
    micro_batches = loader.iterate(0, 10**6)
    next(micro_batches)
    started = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(MICRO_BATCHES):
        next(micro_batches)
    seconds = time.perf_counter() - start
    return Loaded(started, read_anonymous(psutil.Process().pid) - before, seconds / MICRO_BATCHES)


def count_token_bytes(build: Callable[[], Any]) -> int:
    from data.storage.tokenized import BYTES_PER_TOKEN, load_summary

    return load_summary(find_cache(build())).num_tokens * BYTES_PER_TOKEN


def read_anonymous(pid: int) -> int:
    """Bytes of memory that a process holds and no file backs."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


class Peaks:
    """The most anonymous memory that this process and the largest of its children held meanwhile."""

    def __enter__(self) -> Peaks:
        self.own = self.children = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(INTERVAL):
            self.own = max(self.own, read_anonymous(process.pid))
            for child in process.children():
                try:
                    self.children = max(self.children, read_anonymous(child.pid))
                except (OSError, StopIteration):  # it has ended
                    continue


def print_table(measured: dict[int, tuple[Tokenized | None, int, dict[str, Loaded]]]) -> None:
    print(
        "| text | tokens on disk | tokenized in | memory of the process that reads and writes | of one that tokenizes "
        "| start from the cache | "
        "loader of the first stage | of a middle one | of the last | a micro-batch of the first | of the last |"
    )
    print("|---" * 11 + "|")
    for size, (tokenized, token_bytes, stages) in measured.items():
        spent = (
            ["(repeated)", "", ""]
            if tokenized is None
            else [
                f"{tokenized.seconds:,.1f} s ({size / tokenized.seconds:.2f} MB/s)",
                f"{tokenized.main / MB:,.0f} MB",
                f"{tokenized.worker / MB:,.0f} MB",
            ]
        )
        slowest = max(stage.start for stage in stages.values())
        memory = [f"{stages[name].memory / MB:,.1f} MB" for name in STAGES]
        pace = [f"{stages[name].micro_batch * 1000:.2f} ms" for name in ("first", "last")]
        print(
            "| "
            + " | ".join([f"{size:,} MB", f"{token_bytes / MB:,.0f} MB", *spent, f"{slowest:.2f} s", *memory, *pace])
            + " |"
        )
    least, most = measured[min(measured)], measured[max(measured)]
    whole = [tokenized for tokenized, _, _ in measured.values() if tokenized is not None]
    ratios = [f"{getattr(whole[-1], name) / getattr(whole[0], name):.2f}" for name in ("main", "worker")]
    grown = [f"+{(most[2][name].memory - least[2][name].memory) / MB:,.1f} MB" for name in STAGES]
    pace = [f"{most[2][name].micro_batch / least[2][name].micro_batch:.2f}" for name in ("first", "last")]
    print(f"| last / first | {most[1] / least[1]:,.0f} |  | " + " | ".join([*ratios, "", *grown, *pace]) + " |\n")
