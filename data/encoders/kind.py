"""The description of a kind of data: its encoder, and what the rest of a run has to know of its samples."""

from collections.abc import Callable
from dataclasses import dataclass

from data.options import Packing
from data.sample import Encoder


@dataclass(frozen=True)
class DataKind:
    """One kind of data.

    encoder: turns its records into samples; a dataclass whose fields are keys of `data`.
    task: the objective that is trained on it by default.
    together: what the samples of a record are that stay together, in their order; empty where a record is one sample
        or several that do not.
    further: what further samples are that stay together with those, and the key of `data` that is their number; empty
        texts for none.
    concatenates: its samples are documents that are laid end to end and cut where a row is full.
    label_key: the key under which a sample has a label beside its targets; empty where it has none.
    is_whole: whether a sample is one target as a whole, without a label: a user-defined encoder may omit `label`.
    label_names: of the labels of its samples, where they are always the same.
    lists_labels: a record has a list of labels, one for each of its words.
    columns: "module:function" of what the first stage reads of its samples besides their tokens. The function takes
        the keys of `data` and the tokenizer, and returns columns (`ReadColumn` in data/loading/columns.py). Empty for
        nothing.
    front: "module:function" of what gives the first stage its way with these columns (`StageModule.front`). Each rank
        calls it with its stage, the run's source of weights, its device and the dtype of the weights; it may raise
        UserError.
    not_packed, not_split, not_streamed: why data.packing=true, data.length_policy=split or data.streaming=true is
        refused; empty where it is not.
    format_version: part of the names of the tokenized folders of a kind of this project; those of a user's extension
        are named by its source. Raise it whenever its encoder makes other
        samples of the same records and options, or a default of an option changes; what was tokenized is then
        tokenized again. `tests/data/encoders/test_encoder_formats.py` fails where it should have been raised.
    """

    name: str
    encoder: Callable[..., Encoder]
    task: str
    together: tuple[str, ...] = ()
    further: tuple[str, str] = ("", "")
    concatenates: bool = False
    label_key: str = ""
    is_whole: bool = False
    label_names: tuple[str, ...] = ()
    lists_labels: bool = False
    columns: str = ""
    front: str = ""
    not_packed: str = ""
    not_split: str = ""
    not_streamed: str = ""
    format_version: int = 1

    def count_samples(self, data: object) -> int:
        """Return the number of samples that a record becomes, which stay together. data: the keys of `data`."""
        _, key = self.further
        return max(1, len(self.together)) + (getattr(data, key) if key else 0)

    def name_samples(self, count: int) -> list[str]:
        """Return what each of so many samples is that stay together; empty texts where none do."""
        if not self.together:
            return [""] * count
        further = [f"{self.further[0]} {number}" for number in range(1, count - len(self.together) + 1)]
        return [*self.together, *further][:count]

    def choose_packing(self, packs: bool) -> Packing:
        """Return how samples share rows. packs: whether they may."""
        if self.concatenates:
            return Packing.CONCATENATE
        return Packing.BEST_FIT if packs else Packing.NONE
