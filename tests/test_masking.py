"""Secrets are hidden wherever they are written or printed."""

from __future__ import annotations

import pytest

import masking
from masking import MASKED, fingerprint_hidden, mask, mask_text, remember_secrets


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("+logger.trackers.mine.api_key=abc seed=1", f"+logger.trackers.mine.api_key={MASKED} seed=1"),
        ("{_target_: m.T, api_key: abc, n: 3}", f"{{_target_: m.T, api_key: {MASKED}, n: 3}}"),
        (
            'own:{"_target_": "a", "password": 12345, "z": 1}',
            f'own:{{"_target_": "a", "password": "{MASKED}", "z": 1}}',
        ),
        ("https://me:pw@host/x and s3://key@bucket", f"https://{MASKED}@host/x and s3://{MASKED}@bucket"),
        ("http://me:p@ss@host/a, http://host/a@b", f"http://{MASKED}@host/a, http://host/a@b"),
        ("{'client_secret': 'a b'}", f"{{'client_secret': '{MASKED}'}}"),
        ("x.api_key=${oc.env:KEY}", "x.api_key=${oc.env:KEY}"),
        ("data.eos_token=<|im_end|> {pad_token: x} tokens=5, per token: 2", None),
        ("12 tokens/s, 3 of them targets; max_seq_length=5", None),
    ],
)
def test_a_text(text: str, masked: str | None) -> None:
    assert mask_text(text) == (text if masked is None else masked)
    assert mask_text(mask_text(text)) == mask_text(text)


def test_values() -> None:
    config = {
        "logger": {"trackers": {"mine": {"api_key": "a", "port": 3, "password": 12, "tokens": [1]}}},
        "data": {"eos_token": "<x>", "filter": {"_target_": "m.keep", "hub_token": "b"}},
        "files": ["https://a:b@c/d"], "token": None,
    }  # fmt: skip
    assert mask(config) == {
        "logger": {"trackers": {"mine": {"api_key": MASKED, "port": 3, "password": MASKED, "tokens": [1]}}},
        "data": {"eos_token": "<x>", "filter": {"_target_": "m.keep", "hub_token": MASKED}},
        "files": [f"https://{MASKED}@c/d"], "token": None,
    }  # fmt: skip


def test_a_known_secret_is_hidden_wherever_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:uri-password@host")
    monkeypatch.setenv("SOME_API_KEY", "key-of-environment")
    remember_secrets({"trackers": [{"api_key": "key-of-config"}], "seed": "harmless", "token": "ab"})
    text = "key-of-config, key-of-environment, uri-password are wrong; harmless able"
    assert mask_text(text) == f"{MASKED}, {MASKED}, {MASKED} are wrong; harmless able"


def test_a_change_of_what_is_hidden_is_noticed_and_its_value_is_not_confirmed() -> None:
    hidden = fingerprint_hidden({"_target_": "m.Loss", "parts": [{"api_key": "a"}], "scale": 1})
    assert hidden == fingerprint_hidden({"scale": 2, "parts": [{"api_key": "a"}]}), "it covers nothing that is shown"
    changed = ({"api_key": "b"}, {"api_key": ""}, {"url": "https://a:b@c"}, {"password": 1}, {"password": 2})
    assert len({hidden, *map(fingerprint_hidden, changed)}) == len(changed) + 1
    assert fingerprint_hidden({"scale": 1, "eos_token": "</s>"}) == ""
    guesses = [fingerprint_hidden({"password": number}) for number in range(20_000)]
    assert len(set(guesses)) <= 4_096, "many guesses fit"
