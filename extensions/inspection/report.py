"""Shows the model's inputs before training: counts, lengths, how full the rows are, and a few decoded rows.

Nothing here needs an engine; `describe_dataset` and `render_row` return text, `save_histogram` writes a PNG.
"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import matplotlib
import numpy as np
from transformers import PreTrainedTokenizerBase

from console import pluralize
from data.options import Packing
from data.sample import IGNORE_INDEX
from data.storage.packing import pack_best_fit
from data.storage.rows import RowPlan, Rows, compute_fill
from data.storage.tokenized import TokenizedDataset, load_summary

MAX_TOKENS_SHOWN = 600
HISTOGRAM_BINS = 60
TRAINED, MASKED, END = "\x1b[32m", "\x1b[2m", "\x1b[0m"  # green, faint


def describe_dataset(path: Path, plan: RowPlan, label_names: Sequence[str] = ()) -> str:
    """Return the counts of a tokenized folder, one per line. label_names: of the labels of its samples, if any."""
    dataset, rows, summary = TokenizedDataset(path, False, False), Rows(path, plan, False, False), load_summary(path)
    lengths = dataset.lengths
    low, median, high, top = np.percentile(lengths, [0, 50, 95, 100]).astype(int)
    lines = [
        summary.describe_size(),
        f"tokens a sample: {low:,} to {top:,}, mean {lengths.mean():,.1f}, median {median:,},"
        f" 95% have {high:,} or fewer",
        f"target tokens: {summary.num_targets / summary.num_tokens:.1%} of all",
        f"rows: {len(rows):,}, {compute_fill(rows, plan):.1%} of max_seq_length={plan.max_seq_length:,} filled"
        f"{'' if dataset.sample_labels is not None else _compare(rows, lengths, plan)}",
    ]
    if summary.content.stop_tokens:
        ends = sorted(summary.content.stop_tokens.items(), key=lambda end: -end[1])
        lines.append(f"turns end at {', '.join(f'{token} ({count:,})' for token, count in ends)}")
    if dataset.sample_labels is not None:
        lines.append(f"labels: {_count_labels(dataset.sample_labels, label_names)}")
    return "\n".join(lines + [f"skipped: {example}" for example in summary.examples])


def describe_label(label: np.ndarray, names: Sequence[str]) -> str:
    """Return the label of a sample in words. label: [K]: the number of its class, whether it has each class, or
    numbers. names: of the classes, or of the numbers; a document has a single one or not."""
    if label.dtype.kind == "f":
        return ", ".join(f"{name} {value:g}" for name, value in zip_longest(names or ["value"], label))
    if len(label) == 1 and len(names) != 1:
        return names[int(label[0])] if names else str(label[0])
    return ", ".join(name for name, has in zip(names, label, strict=True) if has) or "no label"


def _count_labels(labels: np.ndarray, names: Sequence[str]) -> str:
    """Return in words how many samples have each label, or the range of numbers. labels: [num_samples, K]."""
    if labels.dtype.kind == "f":
        low, mean, high = labels.min(axis=0), labels.mean(axis=0), labels.max(axis=0)
        return "; ".join(
            f"{name} from {low[i]:g} to {high[i]:g}, mean {mean[i]:g}" for i, name in enumerate(names or ["value"])
        )
    has_each = labels.shape[1] > 1 or len(names) == 1
    counts = labels.sum(axis=0) if has_each else np.bincount(labels[:, 0], minlength=len(names))
    return ", ".join(
        f"{name or number} {count:,}" for number, (name, count) in enumerate(zip_longest(names, counts, fillvalue=""))
    )


def _compare(rows: Rows, lengths: np.ndarray, plan: RowPlan) -> str:
    """Return the number of records whose samples stay together, and how full the rows would be if they were packed, in
    words."""
    size, most = plan.group_size, plan.max_seq_length
    together = f", in {pluralize(len(rows.sample_ids) // size, 'record')} of {size} samples" if size > 1 else ""
    if plan.packing is not Packing.NONE:
        return f" (packing efficiency){together}"
    if lengths[rows.sample_ids].reshape(-1, size).sum(axis=1).max() > most:
        return together
    packed = pack_best_fit(rows.sample_ids, lengths, most, size)
    fill = rows.lengths.sum(dtype=np.int64) / (packed.num_rows * most)
    return f"{together}; data.packing=true would make {pluralize(packed.num_rows, 'row')}, {fill:.1%} filled"


def save_histogram(path: Path, plan: RowPlan, title: str, file: Path) -> None:
    """Save a histogram of sample and row lengths as a PNG."""
    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot  # imported here: it picks its backend on import

    figure, axes = pyplot.subplots(figsize=(8, 4))
    bins = np.linspace(0, plan.max_seq_length, HISTOGRAM_BINS + 1).tolist()
    # A document that will be cut can be longer than a row; the last bar counts them.
    lengths = np.minimum(TokenizedDataset(path, False, False).lengths, plan.max_seq_length)
    axes.hist(lengths, bins, alpha=0.8, label="samples")
    if plan.packing is not Packing.NONE:
        axes.hist(Rows(path, plan, False, False).lengths, bins, histtype="step", label="rows")
    axes.set(title=title, xlabel="tokens", ylabel="count", yscale="log")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def choose_rows(num_rows: int, count: int) -> list[int]:
    """Return up to `count` evenly spaced rows from the first to the last."""
    return sorted(set(np.linspace(0, num_rows - 1, count).astype(int).tolist()))


def render_row(
    rows: Rows, row: int, tokenizer: PreTrainedTokenizerBase, in_colour: bool, sample_names: Sequence[str] = ()
) -> str:
    """Return a row decoded: trained parts green and masked ones faint, or trained parts in [[double brackets]]. A
    sample that was truncated has a mark at its end.

    sample_names: of the samples of a record that share the row. Each document then has a title with its own.
    """
    input_ids, position_ids, labels = rows.input_ids(row), rows.position_ids(row), rows.labels(row)
    shown = slice(0, MAX_TOKENS_SHOWN)
    ends = np.cumsum([stop - start for _, start, stop in rows.pieces(row)]).tolist()
    num_cut = dict(zip(ends, rows.count_cut(row), strict=True))
    begins = np.flatnonzero((position_ids[shown] == 0) | _changes(labels[shown])).tolist()
    text, titles = "", iter([_name_document(sample, sample_names) for sample, _, _ in rows.pieces(row)])
    for begin, end in zip(begins, [*begins[1:], len(input_ids[shown])]):
        title = next(titles) if position_ids[begin] == 0 else ""
        if title and (begin or sample_names):
            text += "\n" * (begin > 0) + f"--- {title} ---\n"
        is_trained = labels[begin] != IGNORE_INDEX
        # The label of a turn's stop token may be another token than the template writes there.
        tokens = labels if is_trained else input_ids
        # Data may hold terminal escape sequences.
        text += _mark(tokenizer.decode(tokens[begin:end]).replace("\x1b", "\\x1b"), is_trained, in_colour)
        if num_cut.get(end):
            text += f"\n... {pluralize(num_cut[end], 'token')} truncated"
    left = len(input_ids) - MAX_TOKENS_SHOWN
    return f"{text}\n... and {pluralize(left, 'token')} more" if left > 0 else text


def _name_document(sample: int, sample_names: Sequence[str]) -> str:
    if not sample_names:
        return "next document of the row"
    record, place = divmod(sample, len(sample_names))
    return f"record {record:,}, {sample_names[place]}"


def _changes(labels: np.ndarray) -> np.ndarray:
    """Return where loss begins or ends, bool [T]."""
    has_loss = labels != IGNORE_INDEX
    return np.concatenate([[True], has_loss[1:] != has_loss[:-1]])


def _mark(text: str, is_trained: bool, in_colour: bool) -> str:
    if in_colour:
        return f"{TRAINED if is_trained else MASKED}{text}{END}"
    return f"[[{text}]]" if is_trained else text
