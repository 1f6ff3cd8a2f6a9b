"""Counts of what became of the turns and the content of records, so that nothing is changed or lost silently."""

from dataclasses import dataclass, field

from console import pluralize
from data.options import DEFAULT_DATE

MAX_PLACES = 3


@dataclass
class ContentCounts:
    """Counts of some records.

    Each assistant turn, or answer, counts once. num_target_turns: those that are targets. The others are not, by their
    own `train` or `weight` (num_marked_turns), by `data.train_on` (num_earlier_turns), or as part of a prompt
    (num_prompt_turns). num_text_turns: those of all whose prompt is a text in `data.prompt_template`.
    num_lost_turns: targets that the template rewrites later and that `data.rewritten_turns=last` leaves out.
    num_cut_turns: targets that the length policy cuts off. num_split: conversations that became several
    samples, since their template rewrites earlier turns; num_extra_samples, num_repeated_tokens: what that adds.
    num_hidden_thoughts: turns whose reasoning the template does not show. num_other_masks: turns of which the
    template's `{% generation %}` tags mark something else than what the model has to generate.
    num_default_dates: conversations in which the template writes a date that no keyword gives.
    num_control_tokens: texts of control tokens in the content of records; control_places: the first of them.
    num_empty_prompts: questions without a letter; empty_places: the first of them.
    stop_tokens: what ends the turns.
    """

    num_target_turns: int = 0
    num_marked_turns: int = 0
    num_earlier_turns: int = 0
    num_prompt_turns: int = 0
    num_text_turns: int = 0
    num_lost_turns: int = 0
    num_cut_turns: int = 0
    num_split: int = 0
    num_extra_samples: int = 0
    num_repeated_tokens: int = 0
    num_hidden_thoughts: int = 0
    num_other_masks: int = 0
    num_default_dates: int = 0
    num_control_tokens: int = 0
    num_empty_prompts: int = 0
    empty_places: list[str] = field(default_factory=list)
    control_places: list[str] = field(default_factory=list)
    stop_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """The assistant turns and answers of the records."""
        return self.num_target_turns + self.num_marked_turns + self.num_earlier_turns + self.num_prompt_turns

    def add(self, other: "ContentCounts") -> None:
        for name, value in vars(other).items():
            if name.startswith("num_") and value:
                setattr(self, name, getattr(self, name) + value)
        for token, number in other.stop_tokens.items():
            self.stop_tokens[token] = self.stop_tokens.get(token, 0) + number
        self.control_places = (self.control_places + other.control_places)[:MAX_PLACES]
        self.empty_places = (self.empty_places + other.empty_places)[:MAX_PLACES]

    def note_prompt(self, text: str, where: str) -> None:
        """Count a question that is empty. where: its place."""
        if not text.strip():
            self.num_empty_prompts += 1
            self.empty_places = [*self.empty_places, where][:MAX_PLACES]

    def describe_turns(self) -> list[str]:
        """Return the number of turns, and of those without targets by reason, a line for each that is not 0."""
        reasons = {
            "their own train or weight": self.num_marked_turns,
            "they are not the last one (data.train_on=last_turn)": self.num_earlier_turns,
            "they are part of the prompt": self.num_prompt_turns,
            "the chat template rewrites them later": self.num_lost_turns,
            "cut by data.length_policy": self.num_cut_turns,
        }
        turns = [f"{pluralize(self.num_turns, 'turn')} of the assistant"] if self.num_turns else []
        return turns + [
            f"{pluralize(number, 'turn')} without targets: {reason}" for reason, number in reasons.items() if number
        ]

    def describe(self) -> list[str]:
        """Return what a user should know of the content, one line each; empty where there is nothing to say."""
        parts = []
        if self.num_split:
            parts.append(
                f"{pluralize(self.num_split, 'conversation')} became "
                f"{self.num_split + self.num_extra_samples:,} samples: "
                f"the chat template rewrites earlier turns ({pluralize(self.num_repeated_tokens, 'token')} twice)"
            )
        if self.num_hidden_thoughts:
            parts.append(
                f"the chat template does not show the reasoning of {pluralize(self.num_hidden_thoughts, 'turn')}"
            )
        if self.num_other_masks:
            parts.append(
                f"in {pluralize(self.num_other_masks, 'turn')} the chat template's generation tags, which "
                "decide, mark something "
                "else than what the model generates"
            )
        if self.num_default_dates:
            parts.append(
                f"the chat template writes a date in {self.num_default_dates:,} conversations: {DEFAULT_DATE}, unless "
                "data.template_kwargs={date: ...} is given"
            )
        if self.num_empty_prompts:
            parts.append(f"{self.num_empty_prompts:,} questions are empty, first in {', '.join(self.empty_places)}")
        if self.num_control_tokens:
            parts.append(
                f"{self.num_control_tokens:,} control tokens in the text of records, first in "
                f"{', '.join(self.control_places)}"
            )
        return parts
