"""Measures a stream of training data next to tokenizing the same files beforehand: time, memory, and a resume.

    python benchmarks/streaming.py [--records 20000 80000]

Each size is four shards of JSON lines, texts of about 2,000 characters made of the docstrings of Python's standard
library, read as data=pretrain in rows of 1,024 tokens. In a process of its own the files are tokenized into a cache,
and then streamed once; both in one process, without workers. `reading alone` is what each of several workers does with
the blocks of the others. `first row` is the time from opening the stream to its first row, at its beginning and at a
cursor nine tenths through the pass. Memory is anonymous, and that of the stream alone.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.anonymous import AnonymousPeak  # noqa: E402
from benchmarks.data_scale import MB, alone  # noqa: E402

TEXTS, LENGTH, SHARDS, AT_ONCE = 5, 1024, 4, 64
MOST_CHARACTERS = 600  # of a text
VOCAB_SIZE = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[20_000, 80_000])
    arguments = parser.parse_args()
    names = ["records", "text", "tokens", "tokens/s cached", "tokens/s streamed", "streamed / cached", "reading alone"]
    names += ("first row", "first row of a resume", "memory")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for count in arguments.records:
        with tempfile.TemporaryDirectory(prefix="benchmark-streaming-") as folder:
            print(alone(measure, Path(folder), count), flush=True)


def list_texts() -> list[tuple[str, str]]:
    """Returns the names and docstrings of parts of the standard library."""
    import calendar
    import difflib
    import statistics
    import textwrap

    modules = (argparse, calendar, difflib, inspect, json, random, statistics, tempfile, textwrap)
    parts = [(f"{module.__name__}.{name}", thing) for module in modules for name, thing in vars(module).items()]
    texts = [(name, inspect.getdoc(thing) or "") for name, thing in parts if callable(thing)]
    return [(name, text[:MOST_CHARACTERS]) for name, text in texts if len(text) > 80]


def write_shards(folder: Path, count: int) -> None:
    texts, generator = list_texts(), random.Random(0)
    for shard in range(SHARDS):
        with open(folder / f"{shard}.jsonl", "w") as out:
            for number in range(count // SHARDS):
                chosen = "\n\n".join(text for _, text in generator.sample(texts, TEXTS))
                out.write(json.dumps({"text": f"{shard} {number}\n{chosen}"}) + "\n")


def measure(folder: Path, count: int) -> str:
    """Returns a row of the table."""
    from data.encoders.pretrain import PretrainEncoder
    from data.options import LengthPolicy, Packing
    from data.storage.encoding import Encoding
    from data.storage.rows import RowPlan
    from data.storage.tokenized import load_summary
    from data.storage.tokenizing import prepare_dataset
    from data.streaming.blocks import Cursor, Position, read_blocks
    from data.streaming.shards import list_shards
    from data.streaming.stream import RowStream, StreamPlan
    from scripts.make_demo import train_tokenizer

    tokenizer = train_tokenizer([{"text": text} for _, text in list_texts()], VOCAB_SIZE)
    write_shards(folder, count)
    files = [str(folder / "*.jsonl")]
    encoding = Encoding(PretrainEncoder(), tokenizer, None, LengthPolicy.split)
    shards = tuple(list_shards(files, "train_file"))
    plan = StreamPlan(shards, encoding, RowPlan(LENGTH, Packing.CONCATENATE), seed=0, block_records=4096)

    def time_first_row(cursor: Cursor) -> float:
        start = time.perf_counter()
        RowStream(plan, cursor).take(1)
        return time.perf_counter() - start

    start = time.perf_counter()
    path = prepare_dataset(files, key="train_file", encoding=encoding, cache_dir=folder / "cache", log=None)
    cached, tokens = time.perf_counter() - start, load_summary(path).num_tokens
    start = time.perf_counter()
    for block in read_blocks(shards, Position(), seed=0, block_records=plan.block_records, key="train_file"):
        if block.position.pass_number:
            break
    reading = time.perf_counter() - start
    stream, seen, late = RowStream(plan, Cursor()), 0, Cursor()
    with AnonymousPeak() as peak:
        start = time.perf_counter()
        while seen < tokens:
            seen += int(stream.take(AT_ONCE).lengths.sum())
            late = stream.cursor if seen < 0.9 * tokens else late
        streamed = time.perf_counter() - start
    rates = tokens / cached, seen / streamed
    cells = [f"{count:,}", f"{sum(Path(shard.source).stat().st_size for shard in shards) / MB:,.0f} MB", f"{tokens:,}"]
    cells += [*(f"{rate:,.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}", f"{reading / streamed:.1%}"]
    cells += [f"{time_first_row(cursor):.1f} s" for cursor in (Cursor(), late)]
    return "| " + " | ".join([*cells, f"{peak.added / MB:,.0f} MB"]) + " |"


if __name__ == "__main__":
    main()
