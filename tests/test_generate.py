"""Text from every form that a model comes in is that of the Hugging Face model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from support.adapters import make_adapter
from support.tiny import save_llama, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.conversion.convert import convert_to_pipeline
from models.weights.sources import open_weights
from scripts import generate

PROMPT = "def fill(text, width=70):"
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generate")
    save_llama(root / "hf", initializer_range=0.2)
    save_tokenizer(root / "hf")
    convert_to_pipeline(open_weights(str(root / "hf")), root / "converted")
    make_adapter(root / "adapter", root / "hf")
    save_tokenizer(root / "adapter")
    return root


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", "--max_new_tokens", "8", *arguments])
    generate.main()


def expected(root: Path, text: str, adapter: Path | None = None) -> str:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(root / "hf").eval(),
        AutoTokenizer.from_pretrained(root / "hf"),
    )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    ids = tokenizer(text, return_tensors="pt").input_ids
    start = ids.shape[1]
    for _ in range(8):
        with torch.no_grad():
            following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, following[None]], dim=1)
        if following == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True).strip()


@pytest.mark.parametrize("form", ["hf", "converted", "adapter"])
def test_every_form_gives_the_text_of_the_model(
    form: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--model_name_or_path", str(root / form), "--prompt", PROMPT)
    text = expected(root, PROMPT + "\n", root / "adapter" if form == "adapter" else None)
    assert text and capsys.readouterr().out == f"> {PROMPT}\n{text}\n\n"


def test_a_build_for_gpus_answers_on_the_cpu_where_there_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    assert generate.load_model(open_weights(str(root / "hf"))).device.type == "cpu"


def test_it_answers_where_training_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # on a machine with a GPU
    assert generate.choose_device() == torch.device("cpu")
    monkeypatch.delenv("DS_ACCELERATOR")
    assert generate.choose_device() == torch.device("cuda")


def test_a_file_of_prompts_becomes_a_file_of_conversations(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": PROMPT}]
    records = [
        {"prompt": PROMPT},
        {"messages": [*asked, {"role": "assistant", "content": "of the data set, not of the model"}]},
    ]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    run(
        monkeypatch,
        "--model_name_or_path",
        str(root / "hf"),
        "--prompt_file",
        str(prompts),
        "--output",
        str(answers),
        "--prompt_template",
        "{prompt}",
    )
    answer = {"role": "assistant", "content": expected(root, PROMPT)}
    assert [json.loads(line)["messages"] for line in answers.read_text().splitlines()] == [
        [asked[1], answer],
        [*asked, answer],
    ]


def test_texts_with_line_separators_are_one_prompt(tmp_path: Path) -> None:
    text = "first\u2028second\x85third"
    for name, content in (
        ("a.jsonl", json.dumps({"prompt": text}, ensure_ascii=False) + "\n\n"),
        ("a.txt", f"{text}\n"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert list(generate.read_prompts(tmp_path / name)) == [[{"role": "user", "content": text}]]


def test_the_tokenizers_end_token_ends_an_answer_too(root: Path, tmp_path: Path) -> None:
    """A model whose config names another one, as a base model's does that was trained with a chat model's tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(root / "hf")
    model.config.eos_token_id = model.generation_config.eos_token_id = 3
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    generator = generate.Generator(open_weights(str(tmp_path)), None, max_new_tokens=8, temperature=0.0)
    assert generator._options["eos_token_id"] == [3, generator.tokenizer.eos_token_id]


def test_a_chat_keeps_its_turns(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = generate.Generator(open_weights(str(root / "hf")), None, max_new_tokens=8, temperature=0.0)
    generator.tokenizer.chat_template, generator._template = CHAT_TEMPLATE, None
    lines = iter(["def", "class", ""])
    generator.chat(read=lambda prompt: next(lines))
    first = expected(root, "<s>user: def</s><s>assistant:")
    second = expected(root, f"<s>user: def</s><s>assistant: {first}</s><s>user: class</s><s>assistant:")
    printed = capsys.readouterr().out
    assert first in printed and second in printed.removeprefix(first) and first != second


def test_ctrl_c_leaves_a_chat_without_a_trace(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def readline(self, size: int | None = -1) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(SystemExit) as left:
        run(monkeypatch, "--model_name_or_path", str(root / "hf"))
    assert left.value.code == 130


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n', "prompts.jsonl:1: not a JSON object with 'prompt' or 'messages'"),
        (None, "prompts.jsonl is not there"),
    ],
)
def test_bad_prompts_are_one_line(
    content: str | None, message: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run(monkeypatch, "--model_name_or_path", str(root / "hf"), "--prompt_file", str(file))
