"""The keys of `data` that make a chat of messages reach the tokenizer and the encoder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from support.configs import build_config
from support.tiny import VOCAB_SIZE, save_llama, save_tokenizer
from transformers import AutoTokenizer

from data.counts import ContentCounts
from data.encoders.chat import ChatEncoder
from data.options import ControlTokens, RewrittenTurns, TrainOn
from data.storage.summary import Summary
from data.storage.tokenized import SUMMARY_FILE
from errors import UserError
from models.architecture.lookup import build_layers
from models.weights.sources import open_weights
from training.config.schema import RunConfig
from training.inputs.datasets import (
    build_encoder,
    describe_data,
    list_stop_tokens,
    list_trained_stops,
    load_tokenizer,
)
from training.setup import open_source


def write_config(folder: Path, *overrides: str) -> RunConfig:
    if not (folder / "model").exists():
        save_llama(folder / "model", num_hidden_layers=1)
        save_tokenizer(folder / "model")
    return build_config(f"model_name_or_path={folder}/model", "data=chat", *overrides)


def test_tokens_and_template_reach_the_tokenizer_and_the_model(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<turn>{{ m.content }}<end>{% endfor %}")
    keys = (f"data.chat_template={tmp_path}/mine.jinja", "data.special_tokens=['<turn>']", "data.eos_token='<end>'")
    config = write_config(tmp_path, *keys)
    source = open_source(config, None)
    tokenizer = load_tokenizer(config, source)
    assert source.config.vocab_size == len(tokenizer) == VOCAB_SIZE + 2
    assert tokenizer.eos_token == "<end>" and len(tokenizer("<turn>")["input_ids"]) == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<turn>a<end>"
    layers = build_layers(source.config)
    source.check_complete(layers)
    assert len(source.read_layer(0, layers[0])["weight"]) == VOCAB_SIZE + 2
    assert open_source(write_config(tmp_path), None).config.vocab_size == VOCAB_SIZE


def test_rows_to_spare_are_taken(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", num_hidden_layers=1, vocab_size=VOCAB_SIZE + 8)
    save_tokenizer(tmp_path / "model")
    config = write_config(tmp_path, "data.chat_template=chatml")
    source = open_source(config, None)
    assert source.config.vocab_size == VOCAB_SIZE + 8 and len(load_tokenizer(config, source)) == VOCAB_SIZE + 2
    assert type(source) is type(open_weights(f"{tmp_path}/model"))


def test_a_tokenizer_that_did_not_fit_is_not_grown_for(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", num_hidden_layers=1, vocab_size=VOCAB_SIZE - 8)
    save_tokenizer(tmp_path / "model")
    config = write_config(tmp_path, "data.chat_template=chatml")
    with pytest.raises(UserError, match="has 322 tokens, the embedding 312 rows"):
        load_tokenizer(config, open_source(config, None))


def test_a_model_from_scratch_has_the_rows_too(tmp_path: Path) -> None:
    write_config(tmp_path)
    fields = "{model_type: llama, vocab_size: 320, hidden_size: 48, num_hidden_layers: 1, num_attention_heads: 4}"
    scratch = ("init=random", f"tokenizer_name_or_path={tmp_path}/model", f"+model={fields}")
    assert open_source(write_config(tmp_path, *scratch, "data.chat_template=chatml"), None).config.vocab_size == 322


@pytest.mark.parametrize(("kind", "key"), [("sft", "prompt_template"), ("chat", "messages_field")])
def test_a_key_that_the_encoder_needs_cannot_be_null(tmp_path: Path, kind: str, key: str) -> None:
    with pytest.raises(UserError, match=f"^data.{key}=null: data={kind} needs it; omit the key, or give a text"):
        build_encoder(write_config(tmp_path, f"data={kind}", f"data.{key}=null").data)


def test_train_on_reaches_the_encoder(tmp_path: Path) -> None:
    for kind in ("chat", "sft"):
        data = write_config(tmp_path, f"data={kind}", "data.train_on=last_turn").data
        assert build_encoder(data).train_on is TrainOn.last_turn
        assert build_encoder(dataclasses.replace(data, train_on=TrainOn.all_turns)).train_on is TrainOn.all_turns


def test_keys_of_targets_and_stop_tokens_reach_the_encoder(tmp_path: Path) -> None:
    keys = ("data.rewritten_turns=keep", "data.template_kwargs={enable_thinking: false}", "data.control_tokens=refuse")
    config = write_config(tmp_path, *keys, "data.train_on_reasoning=false")
    tokenizer = load_tokenizer(config, open_source(config, None))
    assert list_stop_tokens(config, tokenizer) == ()  # the eos token alone
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    stops = tuple(sorted(tokenizer.convert_ids_to_tokens([0, 1])))
    assert list_stop_tokens(config, tokenizer) == stops
    elsewhere = AutoTokenizer.from_pretrained(shutil.copytree(tmp_path / "model", tmp_path / "tokenizer"))
    (tmp_path / "tokenizer" / "generation_config.json").unlink()
    assert list_stop_tokens(config, elsewhere) == stops  # next to the weights
    encoder = build_encoder(config.data, stops)
    assert encoder == ChatEncoder(
        rewritten_turns=RewrittenTurns.keep,
        template_kwargs={"enable_thinking": False},
        control_tokens=ControlTokens.refuse,
        train_on_reasoning=False,
        stop_tokens=stops,
    )
    keys = {repr(each) for each in (encoder, build_encoder(config.data), build_encoder(write_config(tmp_path).data))}
    assert len(keys) == 3  # parts of the cache's key


def test_the_stops_of_the_turns_are_those_of_the_export(tmp_path: Path) -> None:
    """With `rewritten_turns=keep` a turn may end as the history shows it, where generation goes on (gpt-oss)."""
    config = write_config(
        tmp_path, "data.special_tokens=['<turn>']", "data.chat_template=chatml", "data.eos_token='</s>'"
    )
    tokenizer = load_tokenizer(config, open_source(config, None))
    assert list_stop_tokens(config, tokenizer) == ("<|im_end|>",)
    (tmp_path / SUMMARY_FILE).write_text(Summary(content=ContentCounts(stop_tokens={"<turn>": 1})).to_json())
    assert list_trained_stops(config, tokenizer, tmp_path) == []
    counts = ContentCounts(stop_tokens={"<|im_end|>": 2, "<turn>": 1})
    (tmp_path / SUMMARY_FILE).write_text(Summary(content=counts).to_json())
    assert list_trained_stops(config, tokenizer, tmp_path) == ["<|im_end|>"]
    # What the export adds to the files next to the checkpoints changes nothing of a resumed run.
    (tmp_path / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])})
    )
    assert list_stop_tokens(config, tokenizer) == ("<|im_end|>",)


def test_a_date_is_part_of_what_a_run_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / SUMMARY_FILE).write_text(Summary().to_json())
    described = describe_data(write_config(tmp_path, "data.template_kwargs={date: 2026-01-31}"), tmp_path)
    assert described["the date in data.template_kwargs"] == "2026-01-31"
    assert set(described) - set(describe_data(write_config(tmp_path), tmp_path)) == {"the date in data.template_kwargs"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("high", "data.template_kwargs=high: give a mapping, such as {enable_thinking: false}"),
        ("{date: 31.1.2026}", "data.template_kwargs: date=31.1.2026 is not a day; give one as in 2026-01-31"),
        ("{documents: {a: b}}", "data.template_kwargs: documents must be a list of objects, such as"),
        ("{tools: [], documents: []}", "data.template_kwargs: tools of a template cannot be set; omit it"),
    ],
)
def test_template_kwargs_that_are_refused(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_encoder(write_config(tmp_path, f"data.template_kwargs={value}").data)
