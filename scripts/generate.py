"""Generates text with a trained model: the folder that a run exports, a training checkpoint, a converted folder, or a
peft folder.

    python scripts/generate.py --model_name_or_path outputs/demo/hf --prompt "What does json.loads do?"
    python scripts/generate.py --model_name_or_path outputs/demo/checkpoints --prompt_file in.jsonl --output out.jsonl
    python scripts/generate.py --model_name_or_path outputs/my_chat/hf     # a chat; an empty line or Ctrl-C ends it
    python scripts/generate.py --model_name_or_path outputs/my_mtp/hf --speculative --prompt "What does json.loads do?"

A prompt is formatted as in training: by the template in the folder's prompt_template.txt, which a run writes whose
prompts were in `data.prompt_template`, else by the tokenizer's chat template. `--prompt_template` overrides both.
`tools` and `chat_template_kwargs` of a record go to the chat template, as in training. `--keep_quantized` and
`--load_in_4bit` put the adapter of a peft folder on its base model, which stays quantized as in training, in place of
merging it in. `--speculative` lets the layers that predict further tokens draft, and reports how many of their drafts
were right; the text is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402
from transformers import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from data.encoders.chat import encode_prompt  # noqa: E402
from data.encoders.messages import read_tools  # noqa: E402
from data.encoders.rendering import RECORD_KWARGS, read_template_kwargs  # noqa: E402
from data.encoders.segments import leading_bos  # noqa: E402
from data.encoders.sft import PROMPT_SLOT  # noqa: E402
from data.encoders.turns import find_stop_tokens  # noqa: E402
from errors import UserError, exit_with_message  # noqa: E402
from filesystem import check_new_file  # noqa: E402
from interpreter import check_interpreter  # noqa: E402
from models.adapters.adapter import Adapter  # noqa: E402
from models.adapters.build import build_adapter  # noqa: E402
from models.adapters.folder import ADAPTER_WEIGHTS  # noqa: E402
from models.adapters.options import AdapterName, AdapterOptions  # noqa: E402
from models.adapters.quantized import make_placeholder, quantize  # noqa: E402
from models.architecture.lookup import build_layers, choose_experts  # noqa: E402
from models.further.layers import FurtherDecoderLayer  # noqa: E402
from models.further.speculative import SpeculativeDecoder  # noqa: E402
from models.heads.table import find_head  # noqa: E402
from models.layers.frozen import FrozenStack  # noqa: E402
from models.storage.folders import PROMPT_TEMPLATE  # noqa: E402
from models.storage.tensor_files import load_json  # noqa: E402
from models.weights.edits import edit_weights  # noqa: E402
from models.weights.further import choose_further  # noqa: E402
from models.weights.published import read_kept  # noqa: E402
from models.weights.source import WeightSource, read_as_stored  # noqa: E402
from models.weights.sources import open_beside_adapter, open_weights  # noqa: E402
from models.weights.vocabulary import add_end, open_tokenizer  # noqa: E402

Messages = list[dict[str, Any]]
DEFAULT_TEMPLATE = "{prompt}\n"
KWARGS = "--template_kwargs"


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer. location: in words. tools, kwargs: what the chat template gets of a record."""

    messages: Messages
    location: str = "the prompt"
    tools: list | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_model(source: WeightSource) -> PreTrainedModel:
    """Returns the Hugging Face model with the weights of `source` in their dtype, an adapter merged in. Of a wrapped
    model only the text model is loaded. Raises UserError for a model without an LM head or missing weights."""
    check_head(source)
    layers = build_layers(source.config, source.wrapper)
    source.check_complete(layers)
    tensors: dict[str, torch.Tensor] = {}
    for index, alone in enumerate(build_layers(source.config)):
        if alone.is_further:
            continue
        for name, tensor in read_as_stored(source, index, layers[index]).items():
            tensors |= {piece.hf_name: tensor[piece.index] for piece in alone.get_pieces(name)}
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    return build_model(source, tensors, dtype).to(choose_device())


def check_head(source: WeightSource) -> None:
    """Raises UserError for a model without an LM head."""
    if (head := find_head(source.config)) is not None:
        raise UserError(
            f"{source.path} is a {head.words} ({source.config.architectures[0]}): it writes no text; load it with "
            f"{head.loaded_with}"
        )


def build_model(source: WeightSource, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Returns the Hugging Face model with these weights, on the CPU, and the source's own way to generate."""
    model: PreTrainedModel = (
        MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]
        .from_pretrained(None, config=source.config, state_dict=tensors, dtype=dtype, trust_remote_code=False)
        .eval()
    )
    if (file := source.config_dir / "generation_config.json").is_file():
        chosen = GenerationConfig.from_dict(load_json(file))
        if chosen.eos_token_id is None:
            chosen.eos_token_id = model.generation_config.eos_token_id
        model.generation_config = chosen
    return model


def load_on_frozen(source: WeightSource, adapter: Adapter) -> PreTrainedModel:
    """Returns the Hugging Face model with frozen weights as a run of `adapter` holds them, quantized, and the adapter
    on its layers. Raises UserError as `load_model` does."""
    layers, device = build_layers(source.config, source.wrapper), choose_device()
    check_head(source)
    source.check_complete(layers)
    dtype = next(iter(source.describe_layer(0, layers[0]).values())).dtype
    source.config._experts_implementation = choose_experts(source.config, 1, dtype)
    tensors: dict[str, torch.Tensor] = {}
    held: dict[int, dict[str, FrozenStack]] = {}
    places = {index: alone for index, alone in enumerate(build_layers(source.config)) if not alone.is_further}
    for index, alone in places.items():
        if not alone.owns_weights:
            continue
        layer, module = layers[index], layers[index].build_on_meta()
        names = adapter.list_frozen(module, layer)
        kept = {} if adapter.in_4bit else read_kept(source, layer, names, dtype)
        read = read_as_stored(source, index, replace(layer, kept=frozenset(kept)))
        if adapter.in_4bit:
            module.load_state_dict(read, assign=True)
            kept = quantize(module, names)
        read |= {name: make_placeholder(module.get_parameter(name).shape, dtype, torch.device("cpu")) for name in kept}
        tensors |= {alone.hf_prefix + name: tensor for name, tensor in read.items()}
        held[index] = {name: stack.to(device) for name, stack in kept.items()}
    model = build_model(source, tensors, dtype)
    as_held = replace(adapter, in_4bit=False, kept=adapter.form)
    for index, kept in held.items():
        module = model.get_submodule(places[index].hf_prefix.removesuffix("."))
        as_held.attach(module, index, layers[index], kept=kept)
    return model.to(device).eval()


def load_further(source: WeightSource, model: PreTrainedModel) -> list[FurtherDecoderLayer]:
    """Returns the layers of `source` that predict further tokens, in the dtype and on the device of the model."""
    further = []
    for index, layer in enumerate(build_layers(source.config)):
        if layer.is_further and layer.owns_weights:
            module = layer.build_on_meta()
            module.load_state_dict(read_as_stored(source, index, layer), assign=True)
            assert isinstance(module, FurtherDecoderLayer)
            further.append(module.to(model.device).eval())
    return further


def list_processing(config: GenerationConfig) -> list[str]:
    """Returns the fields of a generation_config.json by which greedy answers differ from the most likely tokens."""
    others = re.compile("do_sample|temperature|top_.*|min_p|typical_p|max_.*|.*_token_id|transformers_version|_.*")
    return sorted(f"{key}={value}" for key, value in config.to_diff_dict().items() if not others.fullmatch(key))


def choose_device() -> torch.device:
    """Returns the accelerator if there is one, else the CPU; DS_ACCELERATOR overrides it, as in training."""
    chosen = os.environ.get("DS_ACCELERATOR") or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return torch.device(chosen)


def find_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the template that the model of a folder was trained with, None for the chat template."""
    file = folder / PROMPT_TEMPLATE
    template = file.read_bytes().decode(errors="replace") if file.is_file() else ""
    if PROMPT_SLOT in template:  # else another program's file of that name, in which a prompt would have no place
        return template
    return None if tokenizer.chat_template else DEFAULT_TEMPLATE


class Generator:
    """Generates answers to messages, or continues text.

    template_kwargs: what the chat template is called with in addition. speculative: whether further layers draft.
    adapter: put on `source`, whose frozen weights stay quantized; None for a model of whole weights.
    Raises UserError for a model that cannot be loaded, for keywords without a chat template, and for sampling with
    drafts.
    """

    def __init__(
        self,
        source: WeightSource,
        prompt_template: str | None,
        max_new_tokens: int,
        temperature: float,
        template_kwargs: dict[str, Any] | None = None,
        speculative: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        self.tokenizer: PreTrainedTokenizerBase = open_tokenizer(source.path)
        self._template = prompt_template or find_template(source.path, self.tokenizer)
        self._kwargs = template_kwargs or {}
        if self._kwargs and self._template is not None:
            raise UserError(f"{KWARGS} is for chat templates, and none is used here; omit it")
        if speculative and temperature > 0:
            raise UserError("--speculative decodes greedily; omit --temperature")
        if speculative:
            source = edit_weights(source, choose_further(source, trains=True))
        self.model = load_model(source) if adapter is None else load_on_frozen(source, adapter)
        self.decoder = SpeculativeDecoder(self.model, load_further(source, self.model)) if speculative else None
        if ignored := list_processing(self.model.generation_config) if speculative else []:
            print(f"--speculative ignores {', '.join(ignored)} of generation_config.json", file=sys.stderr)
        sampling: dict[str, Any] = (
            {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        )
        ends = self.model.generation_config.eos_token_id
        folders = (source.path, source.config_dir)
        for token in (self.tokenizer.eos_token, *find_stop_tokens(folders, self.tokenizer)):  # as in training
            ends = add_end(ends, None if token is None else self.tokenizer.convert_tokens_to_ids(token))
        self._options = {
            "max_new_tokens": max_new_tokens,
            "pad_token_id": self.tokenizer.eos_token_id,
            "eos_token_id": ends,
            **sampling,
        }

    def answer(self, prompt: Prompt, streamer: TextStreamer | None = None) -> str:
        """Returns the answer to a prompt. Without a chat template only its last message is used."""
        input_ids = torch.tensor([self._encode(prompt)], device=self.model.device)  # [1, T]
        if self.decoder is not None:
            ends = self._options["eos_token_id"]
            ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
            written = self.decoder.generate(input_ids[0].tolist(), self._options["max_new_tokens"], ends)
            return self.tokenizer.decode(written, skip_special_tokens=True).strip()
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), streamer=streamer, **self._options
            )
        return self.tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True).strip()

    def _encode(self, prompt: Prompt) -> list[int]:
        if self._template is not None:
            text = self._template.replace("{prompt}", prompt.messages[-1]["content"])
            # As in training: a tokenizer may append its end token too, after which nothing is to be said
            return leading_bos(self.tokenizer) + self.tokenizer(text, add_special_tokens=False)["input_ids"]
        kwargs = self._kwargs | prompt.kwargs
        return encode_prompt(prompt.messages, prompt.location, self.tokenizer, prompt.tools, kwargs)

    def chat(self, read: Callable[[str], str] = input) -> None:
        """Chats in the terminal until an empty line or the end of the input."""
        streams = self.decoder is None and (self.model.generation_config.num_beams or 1) == 1
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
        messages: Messages = []
        while text := _read_line(read):
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": self.answer(Prompt(messages), streamer)})
            if not streams:  # drafts and beams write nothing before their end
                print(messages[-1]["content"])


def _read_line(read: Callable[[str], str]) -> str:
    try:
        return read("> ").strip()
    except EOFError:
        return ""


def read_prompts(file: Path) -> Iterator[Prompt]:
    """Yields the prompts of a text file, one per line, or of JSON lines with `prompt` or `messages`. Raises UserError
    for any other line."""
    if not file.is_file():
        raise UserError(f"--prompt_file {file} is not there")
    with open(
        file, encoding="utf-8"
    ) as lines:  # not splitlines(): it ends lines at characters that JSON has in its texts
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            location = f"{file}:{number}"
            if file.suffix != ".jsonl":
                yield Prompt([{"role": "user", "content": line.rstrip("\n")}], location)
                continue
            try:
                record = json.loads(line)
                messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
                roles = [message["role"] for message in messages]
            except (json.JSONDecodeError, AttributeError, KeyError, TypeError):
                raise UserError(f"{location}: not a JSON object with 'prompt' or 'messages'") from None
            messages = messages[:-1] if roles[-1] == "assistant" else messages
            _check_messages(messages, location)
            yield Prompt(
                messages,
                location,
                read_tools(record.get("tools"), location),
                read_template_kwargs(record.get(RECORD_KWARGS), f"{location}: {RECORD_KWARGS}"),
            )


def _check_messages(messages: Messages, location: str) -> None:
    """Raise UserError for messages that cannot be answered."""
    if not messages:
        raise UserError(f"{location}: holds an answer alone; give the message that it answers")
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise UserError(
                f"{location}: message {number}: 'content' is of type {type(content).__name__}; give text, since a text "
                "model takes nothing else"
            )


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """Returns what `--template_kwargs` gives, written as `data.template_kwargs` of a config. Raises UserError for
    anything but a mapping."""
    try:
        value = yaml.safe_load(text or "{}")
    except yaml.YAMLError:
        value = text
    return read_template_kwargs(value, KWARGS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--prompt", nargs="+", default=[], help="one or more prompts")
    parser.add_argument("--prompt_file", type=Path, help="one prompt per line, or .jsonl with `prompt` or `messages`")
    parser.add_argument("--output", type=Path, help="JSON lines of prompts and answers; without it they are printed")
    parser.add_argument(
        "--prompt_template",
        help=f"as data.prompt_template in training; without it that of the folder's {PROMPT_TEMPLATE}, else the chat "
        f"template, else {DEFAULT_TEMPLATE!r}",
    )
    parser.add_argument(
        KWARGS, help="as data.template_kwargs in training, such as '{enable_thinking: false}'; JSON works too"
    )
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="accept a folder that brings code; it is never run",
    )
    parser.add_argument(
        "--trust_checkpoint",
        action="store_true",
        help="accept a checkpoint without a manifest.json, and an adapter with another base model than its own",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely token")
    frozen = parser.add_mutually_exclusive_group()
    for key in ("load_in_4bit", "keep_quantized"):
        frozen.add_argument(
            f"--{key}",
            action="store_true",
            help=f"the base model of a peft folder stays quantized, as in a run with adapter.{key}=true",
        )
    parser.add_argument(
        "--speculative",
        action="store_true",
        help="draft with the layers that predict further tokens, and report how many drafts were right",
    )
    arguments = parser.parse_args()
    disable_progress_bar()  # of tensors that have been read already
    try:
        with exit_with_message():
            check_interpreter()
            if arguments.output is not None:
                check_new_file(arguments.output, "--output", replaces=True)
            generate(arguments)
    except KeyboardInterrupt:  # leaves a chat, or an answer that has no end
        print()
        sys.exit(128 + signal.SIGINT)


def open_model(arguments: argparse.Namespace) -> tuple[WeightSource, Adapter | None]:
    """Returns the weights, and the adapter that is put on them where they stay quantized. Raises UserError."""
    name, trust = arguments.model_name_or_path, (arguments.trust_remote_code, arguments.trust_checkpoint)
    if not (arguments.load_in_4bit or arguments.keep_quantized):
        return open_weights(name, *trust), None
    folder = Path(name).expanduser()
    if arguments.speculative or not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(
            "--load_in_4bit and --keep_quantized are for a peft folder, such as hf/ of a LoRA run, without "
            "--speculative; omit them to merge an adapter into its base model"
        )
    source = open_beside_adapter(None, folder, None, *trust)
    options = AdapterOptions(
        name=AdapterName.lora,
        name_or_path=name,
        load_in_4bit=arguments.load_in_4bit,
        keep_quantized=arguments.keep_quantized,
    )
    layers = build_layers(source.config, source.wrapper)
    return source, build_adapter(
        options,
        layers,
        seed=0,
        base_name=str(source.path),
        is_part=source.wrapper is not None,
        form=source.form,
        unconverted=source.unconverted,
    )


def generate(arguments: argparse.Namespace) -> None:
    template_kwargs = parse_template_kwargs(arguments.template_kwargs)
    prompts = [Prompt([{"role": "user", "content": prompt}]) for prompt in arguments.prompt]
    if arguments.prompt_file is not None:
        prompts += read_prompts(arguments.prompt_file)
        if arguments.output is not None and arguments.output.resolve() == arguments.prompt_file.resolve():
            raise UserError(f"--output {arguments.output} is the file of the prompts; give another one")
    source, adapter = open_model(arguments)
    generator = Generator(
        source,
        arguments.prompt_template,
        arguments.max_new_tokens,
        arguments.temperature,
        template_kwargs,
        arguments.speculative,
        adapter,
    )
    if not prompts:
        generator.chat()
        return
    with open(arguments.output, "w", encoding="utf-8") if arguments.output else nullcontext() as output:
        for prompt in prompts:
            answer, messages = generator.answer(prompt), prompt.messages
            if output is None:
                print(f"> {messages[-1]['content']}\n{answer}\n")
            else:
                print(
                    json.dumps({"messages": [*messages, {"role": "assistant", "content": answer}]}, ensure_ascii=False),
                    file=output,
                    flush=True,
                )
    if generator.decoder is not None:
        accepted, drafted = generator.decoder.accepted, generator.decoder.drafted
        print(f"accepted {accepted:,} of {drafted:,} drafts ({accepted / max(1, drafted):.1%})")


if __name__ == "__main__":
    main()
