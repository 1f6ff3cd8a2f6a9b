"""Chat templates for tokenizers that have none: named ones and files.

A template comes with the special tokens that it writes, and the token that ends a turn of the assistant: the tokenizer
gets both, so that what is trained is what is generated later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from errors import UserError

FOLDER = Path(__file__).resolve().parents[1] / "chat_templates"  # NAME.jinja
# Name -> the special tokens that the template writes, and the one that ends a turn; None: the tokenizer's own eos token
NAMED: dict[str, tuple[tuple[str, ...], str | None]] = {
    "alpaca": ((), None),
    "chatml": (("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "gemma": (("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "llama2": ((), None),
    "llama3": (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "mistral": ((), None),
    "phi3": (("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "vicuna": ((), None),
    "zephyr": ((), None),
}

_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@dataclass(frozen=True)
class ChatTemplate:
    """The changes that a run makes to its tokenizer.

    text: Jinja; None keeps the tokenizer's own. special_tokens: added where they are missing. eos_token: ends a turn;
    None keeps the tokenizer's own. name: the value of `data.chat_template`.
    """

    text: str | None = None
    special_tokens: tuple[str, ...] = ()
    eos_token: str | None = None
    name: str = ""

    def __bool__(self) -> bool:
        return self != ChatTemplate()

    @property
    def tokens(self) -> set[str]:
        return {*self.special_tokens, *([self.eos_token] if self.eos_token else [])}

    def apply_to(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set the template and the tokens on the tokenizer. Raises UserError for a text that is not valid Jinja."""
        if self.special_tokens:
            tokens = {"extra_special_tokens": list(self.special_tokens)}
            tokenizer.add_special_tokens(tokens, replace_extra_special_tokens=False)
        if self.eos_token is not None:
            tokenizer.add_special_tokens({"eos_token": self.eos_token})
        if self.text is not None:
            tokenizer.chat_template = self.text
            self._check_syntax(tokenizer)

    def _check_syntax(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            tokenizer.apply_chat_template(_PROBE, tokenize=False)
        except TemplateSyntaxError as error:
            raise UserError(
                f"data.chat_template={self.name}: line {error.lineno} is not valid Jinja: {error.message}; "
                "fix the template"
            ) from None
        except Exception:  # it may refuse this conversation; if it refuses those of the data, the record is named
            return

    def describe(self) -> str:
        """Return a hash of what a resumed run must have in common with the run that it continues."""
        return hashlib.sha256(repr((self.text, self.special_tokens, self.eos_token)).encode()).hexdigest()[:16]


def load_chat_template(
    name_or_path: str | None, special_tokens: Sequence[str] = (), eos_token: str | None = None
) -> ChatTemplate:
    """Return the template that `data.chat_template` names, with `data.special_tokens` added to its own tokens and
    `data.eos_token` in place of its own.

    Raises UserError for an empty token, and for a name that is neither known nor a readable UTF-8 file.
    """
    if "" in special_tokens or eos_token == "":
        raise UserError("data.special_tokens and data.eos_token: a token is empty; give it at least one character")
    if name_or_path is None:
        return ChatTemplate(None, tuple(special_tokens), eos_token)
    tokens, own_eos = NAMED.get(name_or_path, ((), None))
    file = FOLDER / f"{name_or_path}.jinja" if name_or_path in NAMED else Path(name_or_path).expanduser()
    if not file.is_file():
        raise UserError(
            f"data.chat_template={name_or_path}: neither a file nor one of {', '.join(NAMED)}; "
            "give one of these names, or the path of a Jinja file"
        )
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template={name_or_path} cannot be read: {error}; give a UTF-8 text file") from None
    merged = tuple(dict.fromkeys([*tokens, *special_tokens]))
    return ChatTemplate(text, merged, eos_token or own_eos, name_or_path)
