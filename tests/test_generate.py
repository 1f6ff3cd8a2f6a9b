"""Text from every form that a model comes in is that of the Hugging Face model."""

from __future__ import annotations

import io
import json
import shutil
import sys
from datetime import date
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import make_adapter
from support.families import save_family
from support.model_folders import convert, export
from support.quantized import save_fp8, save_mxfp4, save_rounded, write_config
from support.tiny import save_llama, save_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from data.encoders.chat import ChatEncoder
from data.sample import IGNORE_INDEX
from errors import UserError
from models.adapters.adapter import Adapter
from models.conversion.convert import convert_to_pipeline
from models.layers.frozen import FrozenStack
from models.storage.folders import PROMPT_TEMPLATE
from models.weights.source import WeightSource
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
    return continue_ids(root, AutoTokenizer.from_pretrained(root / "hf")(text).input_ids, adapter)


def continue_ids(root: Path, context: list[int], adapter: Path | None = None) -> str:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(root / "hf").eval(),
        AutoTokenizer.from_pretrained(root / "hf"),
    )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([context])
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


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "nf4"])
def test_an_adapter_answers_on_weights_that_stay_quantized(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is peft on the dequantized values, which are in tmp_path/hf."""
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
        save_family(model, "qwen3_moe", num_hidden_layers=2)
        save_rounded(tmp_path / "hf", model)
    else:
        {"fp8": save_fp8, "mxfp4": save_mxfp4}[form](model)
        stored = load_file(model / "model.safetensors")
        wide = {name: t.float() if t.dtype is torch.bfloat16 else t for name, t in stored.items()}
        save_file(wide, model / "model.safetensors", metadata={"format": "pt"})
        write_config(model, dtype="float32")
        export(convert(model, tmp_path / "converted"), tmp_path / "hf")
    make_adapter(adapter, tmp_path / "hf")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": str(model)}))
    for folder in (adapter, tmp_path / "hf"):
        save_tokenizer(folder)
    key = "--load_in_4bit" if form == "nf4" else "--keep_quantized"
    built: list[PreTrainedModel] = []
    load = generate.load_on_frozen

    def keep_model(source: WeightSource, lora: Adapter) -> PreTrainedModel:
        built.append(load(source, lora))
        return built[0]

    monkeypatch.setattr(generate, "load_on_frozen", keep_model)
    run(monkeypatch, "--model_name_or_path", str(adapter), key, "--prompt", PROMPT)
    text = expected(tmp_path, PROMPT + "\n", adapter)
    assert text and capsys.readouterr().out == f"> {PROMPT}\n{text}\n\n"
    held = {each.form for part in built[0].modules() for each in vars(part).values() if isinstance(each, FrozenStack)}
    assert held == {form}


def test_weights_that_stay_quantized_need_an_adapter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, given in (("hf", ()), ("adapter", ("--speculative",))):
        with pytest.raises(SystemExit, match="--load_in_4bit and --keep_quantized are for a peft folder, such as hf/"):
            run(monkeypatch, "--model_name_or_path", str(root / name), "--keep_quantized", *given)


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
        (prompt,) = generate.read_prompts(tmp_path / name)
        assert prompt.messages == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "a"}], ":1: holds an answer alone; give the message that it answers"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            ":1: message 1: 'content' is of type list; give text, since a text model takes nothing else",
        ),
        ([{"role": "user"}], ":1: message 1: 'content' is of type NoneType; give text, since"),
    ],
    ids=["an answer alone", "parts", "none"],
)
def test_messages_that_cannot_be_answered(messages: list[dict], message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    with pytest.raises(UserError) as caught:
        list(generate.read_prompts(file))
    assert str(caught.value).startswith(f"{file}{message}")


def test_answers_do_not_replace_their_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "a.txt", tmp_path / "link.txt"
    file.write_text("a question")
    link.symlink_to(file)
    for output in (file, link):
        with pytest.raises(SystemExit, match="is the file of the prompts; give another one"):
            run(monkeypatch, "--model_name_or_path", "m", "--prompt_file", str(file), "--output", str(output))
    assert file.read_text() == "a question"


def test_the_tokenizers_end_token_ends_an_answer_too(root: Path, tmp_path: Path) -> None:
    """A model whose config names another one, as a base model's does that was trained with a chat model's tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(root / "hf")
    model.config.eos_token_id = model.generation_config.eos_token_id = 3
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    generator = generate.Generator(open_weights(str(tmp_path)), None, max_new_tokens=8, temperature=0.0)
    assert generator._options["eos_token_id"] == [3, generator.tokenizer.eos_token_id]


def test_the_stop_tokens_of_generation_config_end_an_answer(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    generator = generate.Generator(open_weights(str(tmp_path / "hf")), None, max_new_tokens=8, temperature=0.0)
    assert generator._options["eos_token_id"] == [5, 7, generator.tokenizer.eos_token_id]


def test_answers_are_those_of_generate_with_the_models_own_generation_config(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "hf", tmp_path / "hf")
    (tmp_path / "hf/generation_config.json").write_text('{"repetition_penalty": 1.8, "eos_token_id": 2}')
    generator = generate.Generator(open_weights(str(tmp_path / "hf")), "{prompt}", max_new_tokens=24, temperature=0.0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    input_ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    output = model.generate(input_ids, max_new_tokens=24, do_sample=False)[0, input_ids.shape[1] :]
    answer = generator.answer(generate.Prompt([{"role": "user", "content": PROMPT}]))
    assert answer == tokenizer.decode(output, skip_special_tokens=True).strip()
    assert generate.list_processing(model.generation_config) == ["repetition_penalty=1.8"]


def test_no_end_token_is_appended_to_a_prompt(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "hf", tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    special = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer.save_pretrained(tmp_path / "hf")
    generator = generate.Generator(open_weights(str(tmp_path / "hf")), "{prompt}", max_new_tokens=8, temperature=0.0)
    ids = generator._encode(generate.Prompt([{"role": "user", "content": PROMPT}]))
    assert ids == AutoTokenizer.from_pretrained(tmp_path / "hf")(PROMPT).input_ids[:-1] and ids[0] == 1


def test_another_programs_file_of_the_templates_name_is_left_alone(root: Path, tmp_path: Path) -> None:
    """Else every prompt would be the text of that file."""
    shutil.copytree(root / "hf", tmp_path / "hf")
    (tmp_path / "hf" / PROMPT_TEMPLATE).write_bytes(b"Instruction: {instruction}\xff\n")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert generate.find_template(tmp_path / "hf", tokenizer) == generate.DEFAULT_TEMPLATE
    (tmp_path / "hf" / PROMPT_TEMPLATE).write_bytes(b"Q: {prompt}")
    assert generate.find_template(tmp_path / "hf", tokenizer) == "Q: {prompt}"


def save_switched(root: Path, folder: Path) -> Path:
    """The same model with a chat template that has a switch, and a date."""
    shutil.copytree(root / "hf", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% if enable_thinking is defined and not enable_thinking %}no thought {% endif %}{{ strftime_now('%d.%m.') }}"
        "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}" + CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_keywords_of_the_template_are_those_of_training(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save_switched(root, tmp_path / "hf"))
    today = date.today().strftime("%d.%m.")
    for given, start in (
        ([], today),
        (["--template_kwargs", "{enable_thinking: false, date: 2026-01-31}"], "no thought 31.01."),
        (["--template_kwargs", '{"enable_thinking": false}'], "no thought " + today),
    ):
        run(monkeypatch, "--model_name_or_path", model, "--prompt", PROMPT, *given)
        text = expected(root, f"{start}<s>user: {PROMPT}</s><s>assistant:")
        assert capsys.readouterr().out == f"> {PROMPT}\n{text}\n\n"


def test_tools_and_keywords_of_a_record_are_its_own(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, answers = save_switched(root, tmp_path / "hf"), tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    own = {"tools": [{"name": "weather"}], "chat_template_kwargs": {"date": "2026-02-01"}}
    prompts.write_text(json.dumps({"prompt": "def <s>", **own}) + "\n" + json.dumps({"prompt": "def"}) + "\n")
    files = ("--prompt_file", str(prompts), "--output", str(answers))
    keys = ("--template_kwargs", "{enable_thinking: false, date: 2026-01-31}")
    run(monkeypatch, "--model_name_or_path", str(model), *files, *keys)
    found = [json.loads(line)["messages"][-1]["content"] for line in answers.read_text().splitlines()]
    assert found[1] == expected(root, "no thought 31.01.<s>user: def</s><s>assistant:")
    messages = [{"role": "user", "content": "def <s>"}, {"role": "assistant", "content": "x"}]
    sample = ChatEncoder(template_kwargs={"enable_thinking": False}).encode(
        {"messages": messages, **own}, "a:1", AutoTokenizer.from_pretrained(model)
    )
    context = [token for token, label in zip(sample["input_ids"], sample["labels"]) if label == IGNORE_INDEX]
    assert found[0] == continue_ids(root, context)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{date: tomorrow}", "--template_kwargs: date=tomorrow is not a day; give one as in 2026-01-31"),
        ("high", "--template_kwargs=high: give a mapping, such as {enable_thinking: false}"),
        ("{", "--template_kwargs={: give a mapping, such as {enable_thinking: false}"),
        ("{tools: []}", "--template_kwargs: tools of a template cannot be set; omit it"),
        ("{a: 1}", "--template_kwargs is for chat templates, and none is used here; omit it"),
    ],
)
def test_bad_keywords_are_one_line(given: str, message: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--model_name_or_path", str(root / "hf"), "--prompt", "a", "--template_kwargs", given)
    assert ended.value.code == f"error: {message}"


def test_messages_that_the_template_refuses_are_one_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = save_switched(root, tmp_path / "hf"), tmp_path / "a.jsonl"
    file.write_text(
        '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": 1}}\n'
    )
    (model / "chat_template.jinja").write_text("{{ messages[0].nothing.at_all }}")
    with pytest.raises(SystemExit, match=f"error: {file}:1: the chat template refuses the messages .its line 1.: "):
        run(monkeypatch, "--model_name_or_path", str(model), "--prompt_file", str(file))


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
        ('{"messages": ["a"]}\n', "prompts.jsonl:1: not a JSON object with 'prompt' or 'messages'"),
        ('{"prompt": "a", "tools": 1}\n', "prompts.jsonl:1: tools must be a list, not int"),
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
