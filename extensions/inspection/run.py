"""`inspect_data=true`: the rows as the model will see them, without an engine or a process group."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from console import indent_lines, pluralize
from data.encoders.kinds import find_kind
from data.storage.file_report import describe_files, save_skipped
from data.storage.rows import Rows, list_rows
from extensions.inspection.findings import Inspected, describe_findings
from extensions.inspection.page import NAME as page_name
from extensions.inspection.page import save_page
from extensions.inspection.report import choose_rows, describe_dataset, render_row, save_histogram
from training.checkpoint.run_folder import RunFolder
from training.config.incompatible import CheckedConfig
from training.config.schema import RunConfig
from training.config.validate import check_config
from training.distributed.ranks import Ranks
from training.inputs.datasets import build_row_plan, complete_labels, list_entries, load_tokenizer, tokenize
from training.objectives.registry import check_objective, count_rows, get_objective
from training.resolution.readers import check_read
from training.setup import open_source

ROWS_SHOWN = 3
TOKENS_NAMED = 12  # of a sample that looks wrong


def inspect_data(config: RunConfig, ranks: Ranks, given: Collection[str] = ()) -> None:
    """Print the rows as the model will see them. One process is enough: it needs no layout, device or process group.
    Raises UserError."""
    if not ranks.is_main:
        return
    check_config(config, has_accelerator=True)
    check_objective(config)
    for text in check_read(CheckedConfig(config), given, continues=config.resume is not None):
        ranks.say(text)
    source = open_source(config, None)
    config = complete_labels(config, source.config)
    tokenizer = load_tokenizer(config, source)
    print_inspection(config, tokenize(config, tokenizer, ranks.say, compares_bytes=True), tokenizer)


def print_inspection(config: RunConfig, datasets: dict[str, Path], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print what became of each file, counts and a few rows with their masks for `train_file` and what is evaluated,
    and what looks wrong; save histograms of lengths, and a page of samples to read, in `output_dir`."""
    in_colour = sys.stdout.isatty()
    save_skipped(datasets, RunFolder(config.output_dir).skipped)
    facts = describe_files(datasets)
    print("=== files ===", *(indent_lines(f"{name}: {text}") for name, text in facts.items()), "", sep="\n")
    print("trained parts are green, masked ones faint" if in_colour else "trained parts are in [[double brackets]]")
    kind = find_kind(config.data.name)
    names = kind.label_names or tuple(config.data.labels or ())
    group_size, rows_per_group = get_objective(config).group_size(config.data), count_rows(config)
    together = kind.name_samples(group_size)
    for key, path in datasets.items():
        plan = build_row_plan(config, key)
        rows = Rows(path, plan, True, True)
        histogram = Path(config.output_dir) / f"lengths_{key}.png"
        save_histogram(path, plan, key, histogram)
        print(f"\n=== {key} ===\n{describe_dataset(path, plan, names)}\nhistogram of lengths: {histogram}")
        for row in list_rows(np.array(choose_rows(len(rows) // rows_per_group, ROWS_SHOWN)), rows_per_group).tolist():
            num_documents = len(rows.pieces(row))
            documents = f", {num_documents:,} documents" if num_documents > 1 else ""
            counts = f"{pluralize(rows.lengths[row], 'token')}, {rows.num_targets[row]:,} of them targets{documents}"
            name = _name_row(row, together[:rows_per_group])
            text = render_row(rows, row, tokenizer, in_colour, together if group_size > rows_per_group else ())
            print(f"\n--- {name}: {counts} ---\n{text}")
    page = Path(config.output_dir) / page_name
    title = f"{page.parent.name}: data"
    save_page(datasets, page, title=title, tokenizer=tokenizer, sample_names=together, label_names=names)
    print(f"\nsamples to read in a browser: {page}")
    files = [
        Inspected(key, path, [str(entry) for entry in list_entries(config, key)], len(together))
        for key, path in datasets.items()
    ]
    print(f"\n=== what looks wrong ===\n{describe_findings(files, lambda ids: _show(ids, tokenizer))}")


def _show(input_ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first tokens on one line, escaped: data can hold control sequences of a terminal."""
    return repr(tokenizer.decode(input_ids[:TOKENS_NAMED]))


def _name_row(row: int, sample_names: Sequence[str]) -> str:
    if len(sample_names) == 1:
        return f"row {row:,}"
    record, place = divmod(row, len(sample_names))
    return f"record {record:,}, {sample_names[place]}"
