"""The names of the shares and widths of random numbers that layers draw, in modules and configs of `transformers`."""

from __future__ import annotations

import re

# attention_dropout, resid_pdrop, router_jitter_noise. Not those of classifiers and summaries, which no layer of a
# language model reads.
_RANDOM = re.compile(r"^(?!classifier|summary).*(drop|jitter|noise)")


def find_random_key(owner: object) -> str | None:
    """Return the name of an attribute of a module or a config by which layers draw random numbers: a number above 0;
    None where there is none."""
    return next(
        (
            name
            for name, value in vars(owner).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and _RANDOM.match(name)
        ),
        None,
    )
