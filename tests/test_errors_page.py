"""docs/errors.md lists every message that ends a run, and no stale ones."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support.messages import HOLE, ROOT, Message, Sources, normalize, read_sources

from training.config.ranges import list_ranges
from training.config.schema import build_schema

PAGE = ROOT / "docs" / "errors.md"
# Functions that return a reason, which is part of a message or a message itself.
REASONS = {
    "models/generic/family.py": ("find_fault", "_find_leak"),
    "models/generic/wrapped_proof.py": ("_find_fault",),
    "models/storage/manifest.py": ("find_wrong_size", "find_wrong_content", "describe_missing"),
    "models/storage/steps.py": ("find_damaged_latest",),
    "models/weights/sources.py": ("_find_fault_of_latest",),
    "training/distributed/meeting.py": ("_describe_end", "_describe_silence"),
    "training/checkpoint/resume.py": ("_find_quick_damage", "find_damage"),
}
# Raises with the words of a range, which the schema states.
RANGES = "training/config/ranges.py"
# Messages that are not raised: file -> the function that prints them.
SAID = {
    "training/distributed/watchdog.py": "self._report",
    "training/distributed/interrupts.py": "_say",
    "scripts/supervise.py": "say",
    "extensions/elastic/starter.py": "self._say",
    "training/observability/loggers.py": "self._drop",
}


def list_messages(sources: Sources) -> list[Message]:
    raised = sources.calls("UserError") + sources.calls("RawRecord", "problem")
    raised = [
        message
        for message in raised
        if not message.code.endswith(".problem")  # a RawRecord's, which is listed where it is made
        and message.place.partition(":")[0] != RANGES
    ]
    reasons = [
        message
        for file, functions in REASONS.items()
        for function in functions
        for message in sources.returns(function, file)
    ]
    return (
        raised
        + list_range_messages()
        + reasons
        + [message for file, callee in SAID.items() for message in sources.calls(callee, 0, file)]
    )


def list_range_messages() -> list[Message]:
    """Returns the message of each range; it names the key where no other key has the same words."""
    ranges = list_ranges(build_schema()())
    uses = Counter(allowed.words for allowed in ranges.values())
    return [
        Message(f"{key if uses[allowed.words] == 1 else HOLE}={HOLE}: {allowed.words}", f"{RANGES}:{key}", "")
        for key, allowed in ranges.items()
    ]


def list_entries(page: str) -> list[str]:
    """The messages of a page: the first cell of each row that begins with code."""
    cells = re.findall(r"^\| (`.*?`) \| ", page, re.MULTILINE)
    return [normalize(re.sub(r"^(`+)(.*)\1$", r"\2", cell)) for cell in cells]


def compare(messages: list[Message], entries: list[str]) -> tuple[list[str], list[str]]:
    """(messages that are not among the entries, entries that nothing says)."""
    unlisted = {f"{message.place}: {message.text}" for message in messages if message.text not in entries}
    return sorted(unlisted), sorted(set(entries) - {message.text for message in messages})


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(read_sources())


def test_the_page_lists_every_message_and_no_other(sources: Sources) -> None:
    messages, entries = list_messages(sources), list_entries(PAGE.read_text())
    unlisted, stale = compare(messages, entries)
    assert unlisted == [], "docs/errors.md does not list these messages"
    assert stale == [], "docs/errors.md lists these messages, which nothing prints any more"
    assert len(entries) == len(set(entries)), "listed twice"


def test_the_reader_sees_what_raises_in_the_real_sources(sources: Sources) -> None:
    """It finds a message in every file where a plain search does, and can read the words of each."""
    texts = read_sources()
    found = {message.place.partition(":")[0] for message in sources.calls("UserError")}
    assert found == {
        name
        for name, text in texts.items()
        if re.search(r"\bUserError\(f?\W*\w", text.replace("class UserError(ValueError)", ""))
    }
    assert HOLE not in {message.text for message in list_messages(sources)}
    assert not [name for name, text in texts.items() if re.search(r"import .*UserError as|\w\.UserError\b", text)]


def test_every_link_on_the_page_leads_somewhere() -> None:
    for link in set(re.findall(r"\]\(([^)]+)\)", PAGE.read_text())):
        name, _, heading = link.partition("#")
        page = PAGE.parent / name if name else PAGE
        assert page.is_file(), link
        assert not heading or heading in list_headings(page.read_text()), link


def list_headings(page: str) -> list[str]:
    """Returns the anchors of the headings, which have no punctuation."""
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


MADE_UP = """
NAME = "config.json"
def explain(path):
    if path:
        return f"{path} is really not there"
    return "there is no path at all"
class Reader:
    def read(self, key, value, error):
        where = f"{key}: the field named {value}"
        if value == 1:
            raise UserError(f"{where} of {NAME} has {value:,} words and " + ("more" if key else f"{error}..."))
        if value == 2:
            raise UserError(explain(key)) from None
        for number in range(3):
            def inner():
                return UserError(f"seed: {self._describe(value)}; {'a' if value else 'b'}")
        raise ValueError("not for a user")
    def _describe(self, value):
        known = ", ".join(value)
        return f"none of these is it: {known}"
"""
SPOKEN = [
    "...: the field named ... of config.json has ... words and ...",
    "...: the field named ... of config.json has ... words and more",
    "... is really not there",
    "there is no path at all",
    "seed: none of these is it: ...; ...",
]


def test_a_made_up_source_is_read_as_a_person_reads_it() -> None:
    messages = Sources({"made_up.py": MADE_UP}).calls("UserError")
    assert sorted(message.text for message in messages) == sorted(SPOKEN)
    assert {message.place for message in messages} == {"made_up.py:11", "made_up.py:13", "made_up.py:16"}


def test_a_new_message_and_a_gone_one_are_both_found() -> None:
    messages = Sources({"made_up.py": MADE_UP}).calls("UserError")
    page = "".join(f"| `{text}` | cause | cure |\n" for text in SPOKEN) + "| 128 + N | `a code` |\n"
    assert compare(messages, list_entries(page)) == ([], [])
    assert compare(messages, list_entries(page.replace("really not there", "not there"))) == (
        ["made_up.py:13: ... is really not there"],
        ["... is not there"],
    )
    assert list_entries("| ``use `make demo` or ....`` | | x |\n| message | cause | cure |\n|---|---|---|\n") == [
        "use `make demo` or ..."
    ]
