"""Single answers, each labelled desirable or not: a prompt and a completion, texts or lists of messages as in
`data/encoders/preference.py`, and a label."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.messages import refuse_media
from data.encoders.preference import MESSAGES, AnswerKeys, check_answer, split_answers
from data.encoders.segments import CountingEncoder, check_text, get_eos, get_fields, tokenize_sample
from data.encoders.sft import refuse_texts
from data.sample import Sample
from errors import UserError


@dataclass(frozen=True)
class UnpairedEncoder(AnswerKeys, CountingEncoder):
    """Records with a prompt, a completion and a label. A field `tools` goes to the chat template."""

    prompt_field: str = "prompt"
    completion_field: str = "completion"
    label_field: str = "label"

    def encode(
        self,
        record: dict,
        location: str,
        tokenizer: PreTrainedTokenizerBase,
        counts: ContentCounts | None = None,
    ) -> Sample:
        """Return the sample of one record. counts: what was found is added to it. Raises `UserError` naming `location`
        when a field is missing or empty, or the label is not true or false.
        """
        get_eos(tokenizer)  # raises without one
        refuse_media(record, location)
        names = {
            "data.prompt_field": self.prompt_field,
            "data.completion_field": self.completion_field,
            "data.label_field": self.label_field,
        }
        prompt, completion, label = get_fields(record, names, location)
        if not isinstance(label, bool):
            raise UserError(
                f"{location}: field '{self.label_field}' must be true or false, not {label!r}; fix or remove the record"
            )
        check_answer(completion, self.completion_field, location)
        if not isinstance(prompt, list):
            check_text(prompt, f"{location}: field '{self.prompt_field}'")
        if isinstance(prompt, str) and isinstance(completion, str):
            refuse_texts(self.chat_template, location, MESSAGES)
        assert isinstance(prompt, str | list) and isinstance(completion, str | list)
        found = counts or ContentCounts()
        (pieces,) = split_answers(self, prompt, [completion], record, location, tokenizer, found)
        sample = tokenize_sample(pieces, location, tokenizer)
        return Sample(input_ids=sample["input_ids"], labels=sample["labels"], desirable=label)
