"""Generates text with a trained model: the folder that a run exports, a training checkpoint, a converted folder, or a
peft folder.

    python scripts/generate.py --model_name_or_path outputs/demo/hf --prompt "What does json.loads do?"
    python scripts/generate.py --model_name_or_path outputs/demo/checkpoints --prompt_file in.jsonl --output out.jsonl
    python scripts/generate.py --model_name_or_path outputs/my_chat/hf     # a chat; an empty line or Ctrl-C ends it

A prompt is formatted by the tokenizer's chat template, or by `--prompt_template` if it has none.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from errors import UserError  # noqa: E402
from models.architecture.lookup import build_layers  # noqa: E402
from models.layers.score_head import is_reward_model  # noqa: E402
from models.weights.source import WeightSource  # noqa: E402
from models.weights.sources import open_weights  # noqa: E402
from models.weights.vocabulary import add_end, open_tokenizer  # noqa: E402

Messages = list[dict[str, str]]
DEFAULT_TEMPLATE = "{prompt}\n"


def load_model(source: WeightSource) -> PreTrainedModel:
    """Returns the Hugging Face model with the weights of `source` in their dtype, an adapter merged in. Of a wrapped
    model only the text model is loaded. Raises UserError for a reward model or missing weights."""
    if is_reward_model(source.config):
        raise UserError(
            f"{source.path} is a reward model ({source.config.architectures[0]}): it scores text and writes none; load "
            "it with AutoModelForSequenceClassification"
        )
    layers = build_layers(source.config, source.wrapper)
    source.check_complete(layers)
    tensors: dict[str, torch.Tensor] = {}
    for index, alone in enumerate(build_layers(source.config)):
        for name, tensor in source.read_layer(index, layers[index]).items():
            tensors |= {piece.hf_name: tensor[piece.index] for piece in alone.get_pieces(name)}
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    model = (
        MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]
        .from_pretrained(None, config=source.config, state_dict=tensors, dtype=dtype, trust_remote_code=False)
        .eval()
    )
    return model.to(choose_device())


def choose_device() -> torch.device:
    """Returns the accelerator if there is one, else the CPU; DS_ACCELERATOR overrides it, as in training."""
    chosen = os.environ.get("DS_ACCELERATOR") or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return torch.device(chosen)


class Generator:
    """Generates answers to messages, or continues text."""

    def __init__(
        self, source: WeightSource, prompt_template: str | None, max_new_tokens: int, temperature: float
    ) -> None:
        self.model = load_model(source)
        self.tokenizer: PreTrainedTokenizerBase = open_tokenizer(source.path)
        self._template = prompt_template or (None if self.tokenizer.chat_template else DEFAULT_TEMPLATE)
        sampling: dict[str, Any] = (
            {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        )
        ends = add_end(self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id)
        self._options = {
            "max_new_tokens": max_new_tokens,
            "pad_token_id": self.tokenizer.eos_token_id,
            "eos_token_id": ends,
            **sampling,
        }

    def answer(self, messages: Messages, streamer: TextStreamer | None = None) -> str:
        """Returns the answer to `messages`. Without a chat template only the last message is used."""
        if self._template is None:
            inputs = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = self.tokenizer(self._template.replace("{prompt}", messages[-1]["content"]), return_tensors="pt")
        input_ids = inputs["input_ids"].to(self.model.device)
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), streamer=streamer, **self._options
            )
        return self.tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True).strip()

    def chat(self, read: Callable[[str], str] = input) -> None:
        """Chats in the terminal until an empty line or the end of the input."""
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        messages: Messages = []
        while text := _read_line(read):
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": self.answer(messages, streamer)})


def _read_line(read: Callable[[str], str]) -> str:
    try:
        return read("> ").strip()
    except EOFError:
        return ""


def read_prompts(file: Path) -> Iterator[Messages]:
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
            if file.suffix != ".jsonl":
                yield [{"role": "user", "content": line.rstrip("\n")}]
                continue
            try:
                record = json.loads(line)
                messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
            except (json.JSONDecodeError, AttributeError, KeyError):
                raise UserError(f"{file}:{number}: not a JSON object with 'prompt' or 'messages'") from None
            yield messages[:-1] if messages[-1]["role"] == "assistant" else messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--prompt", nargs="+", default=[], help="one or more prompts")
    parser.add_argument("--prompt_file", type=Path, help="one prompt per line, or .jsonl with `prompt` or `messages`")
    parser.add_argument("--output", type=Path, help="JSON lines of prompts and answers; without it they are printed")
    parser.add_argument(
        "--prompt_template",
        help=f"as data.prompt_template in training; {DEFAULT_TEMPLATE!r} if there is no chat template",
    )
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="accept a folder that brings code; it is never run",
    )
    parser.add_argument("--trust_checkpoint", action="store_true", help="accept a checkpoint without a manifest.json")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely token")
    arguments = parser.parse_args()
    disable_progress_bar()  # of tensors that have been read already
    try:
        generate(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:  # leaves a chat, or an answer that has no end
        print()
        sys.exit(128 + signal.SIGINT)


def generate(arguments: argparse.Namespace) -> None:
    prompts: list[Messages] = [[{"role": "user", "content": prompt}] for prompt in arguments.prompt]
    if arguments.prompt_file is not None:
        prompts += read_prompts(arguments.prompt_file)
    source = open_weights(arguments.model_name_or_path, arguments.trust_remote_code, arguments.trust_checkpoint)
    generator = Generator(source, arguments.prompt_template, arguments.max_new_tokens, arguments.temperature)
    if not prompts:
        generator.chat()
        return
    with open(arguments.output, "w", encoding="utf-8") if arguments.output else nullcontext() as output:
        for messages in prompts:
            answer = generator.answer(messages)
            if output is None:
                print(f"> {messages[-1]['content']}\n{answer}\n")
            else:
                print(
                    json.dumps({"messages": [*messages, {"role": "assistant", "content": answer}]}, ensure_ascii=False),
                    file=output,
                    flush=True,
                )


if __name__ == "__main__":
    main()
