"""Templates that write the date of the day: samples are the same on every day, with the date that the keys say."""

from __future__ import annotations

import datetime

import pytest
from support.chat_families import CONVERSATIONS, FAMILIES, build_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from data.counts import ContentCounts
from data.encoders.chat import ChatEncoder
from data.encoders.messages import normalize_message
from data.encoders.rendering import Renderer, read_template_kwargs
from data.options import DEFAULT_DATE, LengthPolicy, OnBadRecord
from data.storage.encoding import Encoding
from errors import UserError
from extensions.preferences.encoders import PreferenceEncoder

BODY = FAMILIES["Qwen2.5"].template
# In the manner of the families that write the date: always (gpt-oss), without a system turn (Mistral), with a fallback
# for callers without `strftime_now` (Llama 3.2), and where `date_string` is all there is (Llama 3.1).
DATED = {
    "always": "Current date: {{ strftime_now('%Y-%m-%d') }}\n" + BODY,
    "without a system turn": (
        "{% if messages[0].role != 'system' %}The current date is {{ strftime_now('%d %B %Y') }}.\n{% endif %}" + BODY
    ),
    "with a fallback": (
        "{% if not date_string is defined %}{% if strftime_now is defined %}"
        "{% set date_string = strftime_now('%B %d, %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}"
        "{% endif %}Today Date: {{ date_string }}\n" + BODY
    ),
    "in a macro": "{% macro today() %}{{ strftime_now('%Y') }}{% endmacro %}{{ today() }}\n" + BODY,
}
FIRST_LINES = {
    "always": "Current date: 2024-02-29",
    "without a system turn": "The current date is 29 February 2024.",
    "with a fallback": "Today Date: February 29, 2024",
    "in a macro": "2024",
}


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    made = build_tokenizer("Qwen2.5")
    monkeypatch.setattr(made, "chat_template", made.chat_template)  # restored at the end
    return made


def be_on(day: datetime.datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers believe that it is another day."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls(day.year, day.month, day.day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def encode(tokenizer: PreTrainedTokenizerFast, record: dict, **kwargs: object) -> tuple[str, ContentCounts]:
    counts = ContentCounts()
    (pieces,) = ChatEncoder(template_kwargs=read_template_kwargs(kwargs, "keys")).split(
        record, "a.jsonl:1", tokenizer, counts
    )
    return "".join(piece.content for piece in pieces if isinstance(piece.content, str)), counts


@pytest.mark.parametrize("name", DATED)
def test_samples_are_the_same_on_every_day(
    name: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = DATED[name]
    record = CONVERSATIONS["two turns"]
    made = set()
    for day in (datetime.datetime(2030, 5, 6), datetime.datetime(2031, 7, 8)):
        be_on(day, monkeypatch)
        assert str(day.year) in tokenizer.apply_chat_template(record["messages"], tokenize=False)
        text, counts = encode(tokenizer, record)
        made.add(text)
        assert counts.num_default_dates == 1
        (said,) = counts.describe()
        assert said == (
            f"the chat template writes a date in 1 conversations: {DEFAULT_DATE}, unless "
            "data.template_kwargs={date: ...} is given"
        )
    assert len(made) == 1 and str(DEFAULT_DATE.year) in made.pop()


@pytest.mark.parametrize("name", DATED)
def test_the_date_of_the_keys_is_written_in_the_form_of_the_template(
    name: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = DATED[name]
    record = CONVERSATIONS["two turns"]
    text, counts = encode(tokenizer, record, date="2024-02-29")
    assert text.splitlines()[0] == FIRST_LINES[name]
    assert counts.num_default_dates == 0 and not counts.describe()
    own = record | {"chat_template_kwargs": {"date": "2024-02-29"}}
    assert encode(tokenizer, own, date="2026-01-31")[0] == text
    assert encode(tokenizer, record, date=None)[0] == encode(tokenizer, record)[0] != text


def test_a_date_that_a_template_reads_as_date_string() -> None:
    tokenizer, record = build_tokenizer("Llama 3.1"), CONVERSATIONS["one turn"]
    shown = {
        "26 Jul 2024": {},  # the template's own
        "05 Mar 2026": {"date": "2026-03-05"},
        "March": {"date": "2026-03-05", "date_string": "March"},
    }
    for date, kwargs in shown.items():
        text, counts = encode(tokenizer, record, **kwargs)
        assert f"Today Date: {date}\n" in text
        assert counts.num_default_dates == 0


def test_a_template_that_sets_its_own_date_string_unless_it_is_given(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
        "Today Date: {{ date_string }}\n" + BODY
    )
    record = CONVERSATIONS["one turn"]
    for date, kwargs in {"26 Jul 2024": {}, "05 Mar 2026": {"date": "2026-03-05"}}.items():
        assert encode(tokenizer, record, **kwargs)[0].startswith(f"Today Date: {date}\n")


def test_only_conversations_in_which_the_date_is_written_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = DATED["without a system turn"]
    assert encode(tokenizer, CONVERSATIONS["system"])[1].num_default_dates == 0
    asked = CONVERSATIONS["one turn"]["messages"][:1]
    answers = {"prompt": asked, "chosen": "Eight.", "rejected": "Six."}
    counts = ContentCounts()
    PreferenceEncoder().split(answers, "a.jsonl:1", tokenizer, counts)
    assert counts.num_default_dates == 2  # each answer is a conversation


def test_a_cache_is_that_of_the_date() -> None:
    def compute_key(**kwargs: object) -> str:
        encoder = ChatEncoder(template_kwargs=kwargs)
        encoding = Encoding(encoder, build_tokenizer("Qwen3"), 64, LengthPolicy.truncate, OnBadRecord.stop)
        return encoding.compute_key([])

    assert len({compute_key(), compute_key(date="2026-01-31"), compute_key(date="2026-02-01")}) == 3


@pytest.mark.parametrize("value", ["31.1.2026", "2026-1-31", "2026-02-30", 20260131, "2026-W05-6", "today", ""])
def test_a_date_that_is_none_is_refused(value: object) -> None:
    record = {**CONVERSATIONS["one turn"], "chat_template_kwargs": {"date": value}}
    with pytest.raises(UserError) as caught:
        ChatEncoder().encode(record, "a:1", build_tokenizer("Qwen3"))
    assert str(caught.value) == f"a:1: chat_template_kwargs: date={value} is not a day; give one as in 2026-01-31"


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_are_rendered_as_transformers_does(name: str) -> None:
    tokenizer = build_tokenizer(name)
    for record in CONVERSATIONS.values():
        for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True, "documents": [{"title": "a"}]}):
            for prompts in (False, True):
                options = {"tools": record.get("tools"), "add_generation_prompt": prompts, **kwargs}
                turns = [normalize_message(turn) for turn in record["messages"]]
                renderer = Renderer(tokenizer, "a:1", record.get("tools"), kwargs)
                try:
                    expected = tokenizer.apply_chat_template(turns, tokenize=False, **options)
                except Exception:
                    with pytest.raises(UserError):
                        renderer.render_prompt(turns) if prompts else renderer.render(turns)
                    continue
                assert (renderer.render_prompt(turns) if prompts else renderer.render(turns)) == expected
