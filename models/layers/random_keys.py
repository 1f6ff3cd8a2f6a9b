"""The names of the shares and widths of random numbers that layers draw, in modules and configs of `transformers`."""

from __future__ import annotations

import re

# attention_dropout, resid_pdrop, router_jitter_noise. Not those of classifiers and summaries, which no layer of a
# language model reads.
_RANDOM = re.compile(r"^(?!classifier|summary).*(drop|jitter|noise)")
_JITTER = re.compile(r".*jitter")


def find_random_key(owner: object) -> str | None:
    """Return the name of an attribute of a module or a config by which layers draw random numbers: a number above 0;
    None where there is none."""
    return _find(owner, _RANDOM)


def find_jitter(owner: object) -> str | None:
    """Return the same of a router, or of the block that it is in, which multiplies its inputs by random numbers."""
    return _find(owner, _JITTER)


def _find(owner: object, pattern: re.Pattern[str]) -> str | None:
    return next(
        (
            name
            for name, value in vars(owner).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and pattern.match(name)
        ),
        None,
    )
