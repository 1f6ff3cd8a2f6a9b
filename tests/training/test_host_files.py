"""Hosts compare what they read; with real hosts in tests/test_two_hosts.py."""

from __future__ import annotations

from training.host_files import Files, compare_obstacles, describe_differences

CONFIG, TOKENIZER = "config.json of the model", "the tokenizer"
ONE: Files = {CONFIG: ("12", "/m/config.json"), TOKENIZER: ("34", "/m")}
SAME: Files = {CONFIG: ("12", "/n/config.json"), TOKENIZER: ("34", "/n")}


def test_the_first_difference_is_named_with_both_fingerprints_and_places() -> None:
    assert describe_differences([("a", ONE), ("b", SAME)]) is None
    other = SAME | {TOKENIZER: ("35", "/n")}
    expected = "the tokenizer: a has 34 (/m), b has 35 (/n); no two hosts have in common: the tokenizer"
    assert describe_differences([("a", ONE), ("b", other)]) == expected
    fewer = {TOKENIZER: ("34", "/n")}
    for pair in ((ONE, fewer), (fewer, ONE)):
        text = str(describe_differences(list(zip("ab", pair, strict=True))))
        assert text.startswith(f"{CONFIG}: ") and "none (nowhere)" in text


def test_of_three_hosts_the_odd_one_is_named_and_what_no_two_have_in_common() -> None:
    odd = SAME | {TOKENIZER: ("35", "/n")}
    found = str(describe_differences([("a", odd), ("b", ONE), ("c", SAME)]))
    assert found == "the tokenizer: b has 34 (/m), a has 35 (/n)"
    third = SAME | {TOKENIZER: ("36", "/n"), CONFIG: ("13", "/n/config.json")}
    found = str(describe_differences([("a", odd), ("b", ONE), ("c", third)]))
    assert found == (
        f"{CONFIG}: a has 12 (/n/config.json), c has 13 (/n/config.json); no two hosts have in common: the tokenizer"
    )


def test_of_many_contents_that_no_two_hosts_have_some_are_named() -> None:
    hosts = [(host, {f"{number}.bin": (f"{host}{number}", "/m") for number in range(9)}) for host in "ab"]
    text = str(describe_differences(hosts))
    assert text.endswith("; no two hosts have in common: 0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 4 more")


def test_hosts_of_which_one_cannot_compile_the_update() -> None:
    assert compare_obstacles([("a", None), ("b", None)]) is None
    assert compare_obstacles([("a", "no gcc"), ("b", "no gcc")]) is None
    message = "some hosts can compile the optimizer's update, and b cannot: no gcc; all have to update alike"
    assert str(compare_obstacles([("a", None), ("b", "no gcc")])).startswith(message)
