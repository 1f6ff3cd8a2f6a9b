"""Hosts compare what they read; with real hosts in tests/test_two_hosts.py."""

from __future__ import annotations

from training.host_files import find_difference


def test_the_first_difference_is_named_with_both_fingerprints_and_places() -> None:
    one = ("a", {"config.json of the model": ("12", "/m/config.json"), "the tokenizer": ("34", "/m")})
    same = ("b", {"config.json of the model": ("12", "/n/config.json"), "the tokenizer": ("34", "/n")})
    assert find_difference(one, same) is None
    other = ("b", {**same[1], "the tokenizer": ("35", "/n")})
    assert find_difference(one, other) == "the tokenizer: a has 34 (/m), b has 35 (/n)"
    fewer = ("b", {"the tokenizer": ("34", "/n")})
    for pair in ((one, fewer), (fewer, one)):
        assert "config.json of the model: " in str(find_difference(*pair)) and "none (nowhere)" in str(
            find_difference(*pair)
        )
