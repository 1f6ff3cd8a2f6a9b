"""Enums for how data is read and batched; members of those that are keys are named as in a config. And what holds where
no key says otherwise.

The schema of a run imports this before torch is loaded, so nothing imported here may be slow.
"""

import datetime
from enum import Enum, StrEnum

# The date that chat templates write where no keyword gives one: a constant, since samples must not depend on the day on
# which they are made. Raise FORMAT_VERSION of data/storage/cache.py with it.
DEFAULT_DATE = datetime.date(2026, 1, 1)


class LengthPolicy(Enum):
    """The treatment of a sample of more than T tokens, T being `max_seq_length`.

    `truncate` keeps the first T tokens, `drop` none, `split` all targets: in pieces of T tokens, each a sample of its
    own that starts with the last token of the previous piece.
    """

    truncate = "truncate"
    drop = "drop"
    split = "split"


class TrainOn(Enum):
    """The assistant turns that are targets; a flag of a turn (`train`, `weight`) takes precedence."""

    all_turns = "all_turns"
    last_turn = "last_turn"


class RewrittenTurns(Enum):
    """The treatment of conversations whose chat template shows earlier turns otherwise than they were generated.

    `split` makes a sample for each such turn, `last` trains on the turns that the last context shows unchanged, `keep`
    on all, as the whole conversation shows them.
    """

    split = "split"
    last = "last"
    keep = "keep"


class ControlTokens(Enum):
    """The treatment of texts of control tokens in the content of records: `text` reads their letters, `parse` makes
    them the token, `refuse` ends the run.
    """

    text = "text"
    parse = "parse"
    refuse = "refuse"


class OnBadRecord(Enum):
    """`stop` ends the run with the record's location and problem; `skip` omits and counts it."""

    stop = "stop"
    skip = "skip"


class Packing(StrEnum):
    """`none`: one sample per row. `best_fit`: whole samples share a row. `concatenate`: cut where a row is full."""

    NONE = "none"
    BEST_FIT = "best_fit"
    CONCATENATE = "concatenate"

    def count_rows(self, group_size: int) -> int:
        """Return the rows of `group_size` samples that stay together: one each, or a single one that they share."""
        return group_size if self is Packing.NONE else 1


class MixtureUnit(Enum):
    """The unit of the shares of a mixture."""

    samples = "samples"
    tokens = "tokens"


class PadTo(Enum):
    """`longest`: the longest row of the global batch, rounded up to a multiple of 8; or always `max_seq_length`."""

    longest = "longest"
    max_seq_length = "max_seq_length"


class RowTargets(Enum):
    """The targets of a row. `next_tokens`: at each position the token that follows. `last_tokens`: its documents, each
    at its last token."""

    next_tokens = "next_tokens"
    last_tokens = "last_tokens"


class ProblemType(Enum):
    """The meaning of the labels of a record, in the words of `transformers`: one class, any number of classes, or
    numbers."""

    single_label_classification = "single_label_classification"
    multi_label_classification = "multi_label_classification"
    regression = "regression"


class MeanOver(Enum):
    """The terms that the loss of a global batch is a mean over.

    `samples` are those of the data, or the groups of them that stay together: a pair is one term, in a packed row too.
    """

    targets = "targets"
    samples = "samples"
