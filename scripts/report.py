"""Prints a short table of a run, and draws its loss, from its `metrics.jsonl`.

python scripts/report.py --output_dir outputs/demo         # also writes outputs/demo/loss.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    output_dir = parser.parse_args().output_dir
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "eval_loss" in record]
    picture = output_dir / "loss.png"
    plot_loss(training, evaluations, picture)
    print_table(training, evaluations, output_dir, picture)


def plot_loss(training: list[dict[str, Any]], evaluations: list[dict[str, Any]], picture: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([r["step"] for r in training], [r["loss"] for r in training], label="training")
    if evaluations:
        axes.plot([r["step"] for r in evaluations], [r["eval_loss"] for r in evaluations], "o", label="evaluation")
    axes.set(xlabel="optimizer step", ylabel="loss per target token", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


def print_table(
    training: list[dict[str, Any]], evaluations: list[dict[str, Any]], output_dir: Path, picture: Path
) -> None:
    rows = [("training loss, first and last report", f"{training[0]['loss']:.3f} -> {training[-1]['loss']:.3f}")]
    if evaluations:
        rows.append(
            (
                "evaluation loss, before and after",
                f"{evaluations[0]['eval_loss']:.3f} -> {evaluations[-1]['eval_loss']:.3f}",
            )
        )
    rows += [
        ("tokens/s without padding, median", f"{statistics.median(r['tokens_per_second'] for r in training):,.0f}"),
        ("figures of each step", str(output_dir / "metrics.jsonl")),
        ("picture of the loss", str(picture)),
        ("checkpoint, to continue from", str(output_dir / "checkpoints")),
        ("Hugging Face model", str(output_dir / "hf")),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows))


if __name__ == "__main__":
    main()
