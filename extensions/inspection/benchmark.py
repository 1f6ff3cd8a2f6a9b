"""Measures the report on the data: its time beyond tokenization, and its memory, from few records to many.

    python -m extensions.inspection.benchmark [--records 25000 100000]

Each size is a file of conversations of one to three turns, made of the docstrings of Python's standard library, and an
evaluation file of a hundredth of it. In a process of its own the files are tokenized, and then the report is made as
`inspect_data=true` makes it: counts of each file with what the files share, what looks wrong, histograms, and the page.
What the hashes of records add to tokenization is measured again, apart. Memory is anonymous.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.anonymous import AnonymousPeak
from benchmarks.data_scale import MB, alone
from benchmarks.streaming import VOCAB_SIZE, list_texts


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m extensions.inspection.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--records", type=int, nargs="+", default=[25_000, 100_000])
    arguments = parser.parse_args()
    names = ["records", "tokens", "tokenized in", "of it hashes", "files", "findings", "histograms", "page"]
    names += ("beyond tokenization", "memory", "size of the page")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for count in arguments.records:
        with tempfile.TemporaryDirectory(prefix="benchmark-data-report-") as folder:
            print(alone(measure, Path(folder), count), flush=True)


def write_conversations(file: Path, count: int, seed: int) -> None:
    texts, generator = list_texts(), random.Random(seed)
    with open(file, "w") as out:
        for number in range(count):
            messages = []
            for name, text in generator.sample(texts, generator.randint(1, 3)):
                messages.append({"role": "user", "content": f"{number}: what does {name} do?"})
                messages.append({"role": "assistant", "content": text})
            out.write(json.dumps({"messages": messages}) + "\n")


def measure(folder: Path, count: int) -> str:
    """Returns a row of the table."""
    from data.encoders.chat import ChatEncoder
    from data.encoders.chat_templates import load_chat_template
    from data.sources.selection import hash_record
    from data.storage.encoding import Encoding
    from data.storage.file_report import describe_files
    from data.storage.rows import RowPlan
    from data.storage.tokenized import load_summary
    from data.storage.tokenizing import prepare_dataset
    from extensions.inspection.findings import Inspected, describe_findings
    from extensions.inspection.page import NAME, save_page
    from extensions.inspection.report import save_histogram
    from scripts.make_demo import train_tokenizer

    tokenizer = train_tokenizer([{"text": text} for _, text in list_texts()], VOCAB_SIZE)
    load_chat_template("chatml", [], None).apply_to(tokenizer)
    files = {"train_file": count, "eval_file": count // 100}
    for seed, (key, records) in enumerate(files.items()):
        write_conversations(folder / key, records, seed)
    encoding, plan, seconds = Encoding(ChatEncoder(), tokenizer, 1024), RowPlan(1024), dict[str, float]()

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[what] = time.perf_counter() - start

    with timed("tokenizing"):
        datasets = {
            key: prepare_dataset([str(folder / key)], key=key, encoding=encoding, cache_dir=folder, log=None)
            for key in files
        }
    parsed = [json.loads(line) for key in files for line in (folder / key).open()]
    with timed("hashes"):
        for record in parsed:
            hash_record(record)
    del parsed
    with AnonymousPeak() as peak:
        with timed("files"):
            describe_files(datasets)
        with timed("findings"):
            inspected = [Inspected(key, path, [key]) for key, path in datasets.items()]
            describe_findings(inspected, lambda ids: tokenizer.decode(ids[:12]))
        with timed("histograms"):
            for key, path in datasets.items():
                save_histogram(path, plan, key, folder / f"{key}.png")
        with timed("page"):
            save_page(datasets, folder / NAME, title="", tokenizer=tokenizer)
    tokens = sum(load_summary(path).num_tokens for path in datasets.values())
    beyond = sum(seconds.values()) - seconds["tokenizing"]
    cells = [f"{count:,}", f"{tokens:,}", *(f"{each:.1f} s" for each in seconds.values()), f"{beyond:.1f} s"]
    sizes = [f"{number / MB:,.1f} MB" for number in (peak.added, (folder / NAME).stat().st_size)]
    return "| " + " | ".join([*cells, *sizes]) + " |"


if __name__ == "__main__":
    main()
