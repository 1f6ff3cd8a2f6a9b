"""The assistant turns of a record, and which of them are not to be trained on: counts for the report on the data.

Read from the record alone, next to the encoders: what an encoder made of a turn is counted on its labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.encoders.chat import ASSISTANT, SHAREGPT_FIELD, SHAREGPT_ROLES, TURN_FLAGS, ChatEncoder
from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.options import TrainOn
from data.sample import Encoder


@dataclass
class TurnCounts:
    """Counts of assistant turns, or of answers. Without targets are: num_marked, by their own `train` or `weight`;
    num_earlier, by `data.train_on`; num_cut, by the length policy; num_unshown, since the chat template shows them in
    another form."""

    num_turns: int = 0
    num_marked: int = 0
    num_earlier: int = 0
    num_cut: int = 0
    num_unshown: int = 0

    def add(self, other: "TurnCounts") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def describe(self) -> str:
        """Return the counts in words; empty where there are no turns."""
        if not self.num_turns:
            return ""
        reasons = {
            "by their own train or weight": self.num_marked,
            "before the last one (data.train_on=last_turn)": self.num_earlier,
            "cut by data.length_policy": self.num_cut,
            "that the chat template shows in another form": self.num_unshown,
        }
        parts = [f"{number:,} {reason}" for reason, number in reasons.items() if number]
        without = f", {sum(reasons.values()):,} of them without targets: {', '.join(parts)}" if parts else ""
        return f"{self.num_turns:,} assistant turns{without}"


def count_turns(encoder: Encoder, record: dict) -> TurnCounts | None:
    """Return the assistant turns of a record that the encoder has read; None where each target is a turn.

    Documents have none.
    """
    if isinstance(encoder, PretrainEncoder):
        return TurnCounts()
    turns = _list_assistant_turns(encoder, record) if isinstance(encoder, ChatEncoder | SFTEncoder) else None
    if turns is None:
        return None
    flags = [_read_flag(turn) for turn in turns]
    last_only = getattr(encoder, "train_on", TrainOn.all_turns) is TrainOn.last_turn
    earlier = sum(flag is None for flag in flags[:-1]) if last_only else 0
    return TurnCounts(len(turns), num_marked=flags.count(False), num_earlier=earlier)


def _list_assistant_turns(encoder: ChatEncoder | SFTEncoder, record: dict) -> Sequence[dict] | None:
    if isinstance(encoder, SFTEncoder) and encoder.prompt_field in record and encoder.completion_field in record:
        return None
    if encoder.messages_field in record:
        return [turn for turn in record[encoder.messages_field] if turn["role"] == ASSISTANT]
    if SHAREGPT_FIELD in record:
        return [turn for turn in record[SHAREGPT_FIELD] if SHAREGPT_ROLES.get(turn["from"]) == ASSISTANT]
    return None


def _read_flag(turn: dict[str, Any]) -> bool | None:
    """Return whether the turn says that it is trained on; None where it does not say."""
    return next((bool(turn[name]) for name in TURN_FLAGS if turn.get(name) is not None), None)
