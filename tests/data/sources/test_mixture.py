"""Mixtures: the requested shares, every sample seen, the same in every run."""

import json
from pathlib import Path

import numpy as np
import pytest

from data.encoders.sft import SFTEncoder
from data.options import MixtureUnit, Packing
from data.sources.mixture import Mixture, ShareKind
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, count_rows, prepare_rows
from data.storage.tokenizing import prepare_dataset
from errors import UserError

COUNTS = (100, 30, 400)
SOURCES = np.repeat([0, 1, 2], COUNTS)
LENGTHS = np.random.default_rng(0).integers(1, 50, len(SOURCES)).astype(np.int32) * (1 + SOURCES.astype(np.int32))


def shares_of(sample_ids: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    seen = np.bincount(SOURCES[sample_ids], weights=amounts[sample_ids], minlength=3)
    return seen / seen.sum()


@pytest.mark.parametrize("weights", [(1, 1, 1), (5, 1, 2), (0.7, 0.2, 0.1), (100, 30, 400)])
@pytest.mark.parametrize("unit", MixtureUnit)
def test_weights_are_shares_and_every_sample_is_seen(unit: MixtureUnit, weights: tuple[float, ...]) -> None:
    chosen = Mixture(weights, ShareKind.WEIGHT, unit).choose_samples(SOURCES, LENGTHS)
    amounts = LENGTHS if unit is MixtureUnit.tokens else np.ones_like(LENGTHS)
    assert shares_of(chosen, amounts) == pytest.approx(np.array(weights) / sum(weights), abs=0.004)
    times = np.bincount(chosen, minlength=len(SOURCES))
    for source in range(3):
        source_times = times[source == SOURCES]
        assert source_times.min() >= 1 and source_times.max() - source_times.min() <= 1
    assert min(times[source == SOURCES].max() for source in range(3)) == 1  # no longer than necessary


def test_weights_that_are_the_sizes_change_nothing() -> None:
    assert Mixture(COUNTS).choose_samples(SOURCES, LENGTHS).tolist() == list(range(len(SOURCES)))


def test_epochs_repeat_a_source() -> None:
    chosen = Mixture((1, 2.5, 0.25), ShareKind.EPOCHS).choose_samples(SOURCES, LENGTHS)
    assert np.bincount(SOURCES[chosen]).tolist() == [100, 75, 100]
    assert np.bincount(chosen)[:100].tolist() == [1] * 100 and set(np.bincount(chosen)[100:130]) == {2, 3}


def test_the_choice_is_the_same_in_every_run() -> None:
    mixture = Mixture((0.5, 0.5, 0.5), ShareKind.EPOCHS)
    first, again = (mixture.choose_samples(SOURCES, LENGTHS) for _ in range(2))
    assert np.array_equal(first, again) and len(first) == 265
    assert first[:50].tolist() != list(range(50))  # not the first half of the file


def test_a_source_without_a_sample() -> None:
    with pytest.raises(UserError, match="^train_file: entry 4 of the mixture has no sample left; omit it"):
        Mixture((1, 1, 1, 1)).choose_samples(SOURCES, LENGTHS)


@pytest.mark.parametrize("packing", Packing)
def test_rows_hold_the_mixture_and_the_log_says_so(tokenizer, tmp_path: Path, packing: Packing) -> None:
    for name, count in (("a", 30), ("b", 10)):
        records = [{"prompt": name, "completion": f"{name} {n}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    encoding = Encoding(SFTEncoder(), tokenizer, None if packing is Packing.CONCATENATE else 32)
    path = prepare_dataset(files, key="train_file", encoding=encoding, cache_dir=tmp_path / "cache")
    plan = RowPlan(32, packing, Mixture((1, 1)))
    lines: list[str] = []
    prepare_rows(path, plan, "train_file", lines.append, names=["a.jsonl", "b.jsonl"])
    assert lines[0] == (
        "train_file: an epoch of the mixture, by samples: a.jsonl 50.0% (30 samples, 1.00 times), "
        "b.jsonl 50.0% (30 samples, 3.00 times)"
    )
    rows = Rows(path, plan, True, True)
    if packing is not Packing.CONCATENATE:
        text = "".join(tokenizer.decode(rows.input_ids(row)) for row in range(count_rows(path, plan)))
        assert text.count("b 7</s>") == 3 and text.count("a 7</s>") == 1 and text.count("</s>") == 60
    # The tokens are shared with a run that does not mix.
    assert prepare_dataset(files, key="train_file", encoding=encoding, cache_dir=tmp_path / "cache") == path
    assert count_rows(path, RowPlan(32)) == 40
