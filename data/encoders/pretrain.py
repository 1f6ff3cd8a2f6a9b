"""Raw text: `[bos] text eos`, all of it trained on. Documents are laid end to end and cut where a row is full."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.control_tokens import Guard
from data.encoders.segments import Piece, PieceEncoder, Pieces, check_text, get_eos, get_fields, leading_bos
from data.options import ControlTokens
from errors import UserError


@dataclass(frozen=True)
class PretrainEncoder(PieceEncoder):
    """Records with a text field; a plain text file is one record with the field `text`."""

    text_field: str = "text"
    control_tokens: ControlTokens | None = None  # None: parse

    def split(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase, counts: ContentCounts
    ) -> list[Pieces]:
        """Return the document of one record. Raises `UserError` naming `location` for a missing, empty or non-text
        field."""
        (value,) = get_fields(record, {"data.text_field": self.text_field}, location)
        text = check_text(value, f"{location}: field '{self.text_field}'")
        if not text.strip():
            raise UserError(f"{location}: field '{self.text_field}' is empty; fill it or remove the record")
        guard = Guard(tokenizer, self.control_tokens, counts)
        text = guard.protect_text(text, f"{location}: field '{self.text_field}'")
        body = guard.release([Piece(text, True)])
        return [[Piece(leading_bos(tokenizer), True), *body, Piece([get_eos(tokenizer)], True)]]
