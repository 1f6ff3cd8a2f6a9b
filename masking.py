"""Hides secrets in all that is written or printed: the value of a key that is named like one, the user part of a URL,
and any text that repeats such a value.

A config, a command line and the environment hold secrets. A run uses them as they are; what it writes goes through
`mask` (values) or `mask_text` (text).
"""

from __future__ import annotations

import hashlib
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

MASKED = "***"
# A tokenizer's tokens are no secrets: `data.eos_token`, and the fields of a model's config.
_TOKENS = r"(?!(?:\w*[._])?(?:bos|eos|pad|unk|sep|cls|mask|image|audio|video)_token\b)"
_SECRET = rf"{_TOKENS}\w*?(?:api_?key|token|secret|password)"
_SECRET_KEY = re.compile(rf"(?:.*\.)?{_SECRET}", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(?<=://)[^\s/'\"]+(?=@)")  # up to the last @, as clients read it
_OVERRIDE = rf"(?<!\w)(?:[+\w@-]+\.)*{_SECRET}="  # key=value
_ENTRY = rf"""(?<=[{{,\n'"])\s*['"]?{_SECRET}(?P<quote>['"]?)\s*:\s*"""  # key: value, in a mapping
_NO_INTERPOLATION = r"""(?!['"]?\$\{)"""
_VALUE = r"""(?P<value>'[^']*'|"[^"]*"|[^\s,'"{}\[\]]+)"""
_GIVEN = re.compile(rf"(?P<key>(?:{_OVERRIDE})|(?:{_ENTRY})){_NO_INTERPOLATION}{_VALUE}", re.IGNORECASE)
_MIN_LENGTH = 6  # characters of a value that is hidden wherever it occurs; a shorter one may be a part of any word
_known: set[str] = set()


def remember_secrets(config: Any) -> None:
    """Hide the secrets of a config and of the environment wherever they occur from now on, in this process."""
    _known.update(value for value in _find(config) if len(value) >= _MIN_LENGTH)
    _known.update(value for value in _find(dict(os.environ)) if len(value) >= _MIN_LENGTH)


def mask(value: Any, key: str = "") -> Any:
    """Return nested values without secrets. key: the name of the value."""
    if isinstance(value, Mapping):
        return {name: mask(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask(inner, key) for inner in value]
    if _is_secret(value, key):
        return MASKED
    return mask_text(value) if type(value) is str else value


def fingerprint_hidden(value: Any) -> str:
    """Return a hash of what `mask` hides in nested values, to notice another value by; empty if it hides nothing.

    The hash has 12 bits: one change in 4,096 goes unnoticed, and who guesses a secret can rule guesses out by it, but
    confirm none. It covers nothing else, so that hashes of one secret next to different values reveal no more."""
    hidden = list(_list_hidden(value, mask(value)))
    return hashlib.sha256(repr(hidden).encode()).hexdigest()[:3] if hidden else ""


def mask_text(text: str) -> str:
    """Return a text without secrets."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASKED)
    return _GIVEN.sub(_mask_given, _USER_OF_URL.sub(MASKED, text))


def print_exception(error: BaseException, stream: TextIO) -> None:
    """Print an exception's stack trace without secrets."""
    print(mask_text("".join(traceback.format_exception(error))), end="", file=stream, flush=True)


def _mask_given(found: re.Match[str]) -> str:
    value = found["value"]
    mark = value[0] if value[0] in "'\"" else '"' if found["quote"] == '"' else ""
    return f"{found['key']}{mark}{MASKED}{mark}"


def _is_secret(value: Any, key: str) -> bool:
    has_value = value not in ("", None) and not isinstance(value, bool)
    return has_value and _SECRET_KEY.fullmatch(key) is not None


def _list_hidden(value: Any, masked: Any) -> Iterator[Any]:
    """Yield what differs between nested values and the same without secrets."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield from _list_hidden(value[name], masked[name])
    elif isinstance(value, list | tuple):
        for inner, masked_inner in zip(value, masked, strict=True):
            yield from _list_hidden(inner, masked_inner)
    elif value != masked:
        yield value


def _find(value: Any, key: str = "") -> Iterator[str]:
    """Yield the secrets in nested values. key: the name of the value."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _find(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _find(inner, key)
    elif _is_secret(value, key):
        yield str(value)
    elif isinstance(value, str):
        for user in _USER_OF_URL.findall(value):
            yield from (user, user.partition(":")[2])
