"""The inputs of the rows, made once per part: models of random weights, a tokenizer whose words are tokens, records.

A word is a token, so that lengths are what they are meant to be.

    python -m benchmarks.gpu_parts.material FOLDER DEVICE DTYPE '{"hidden_size": ...}'     the model, drawn on a device
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_SPECIAL = ("<s>", "</s>", "<pad>")  # no beginning of a word: a special token is found within words too
_WORDS = 500  # of the tokenizer; the model's vocabulary may be larger
# Documents of a step, in 128ths of a row. Several to a row, of different lengths, and with different numbers of
# targets; their number and that of the rows they are packed into are multiples of 8, for 2 stages, 2 replicas and
# micro-batches of 2.
LENGTHS = (128, 110, 100, 90, 90, 70, 64, 64, 60, 50, 40, 36, 30, 28, 20, 12)
MakeRecord = Callable[[int, int, Callable[[int], str]], dict[str, object]]  # as `Task` has it

PADDING = _SPECIAL.index("<pad>")
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": PADDING}
# The name of a model -> its model_type, and fields that are not those of its size
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "classifier": ("llama", {"num_labels": 1}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *(f"w{i}" for i in range(len(_SPECIAL), _WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("bos_token", "eos_token", "pad_token"), _SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def save_records(
    file: Path, lengths: Sequence[int], make_record: MakeRecord | None = None, prompt: int | None = None
) -> None:
    """Records. lengths: of the samples in tokens, the end among them. make_record: as of `Task`. prompt: without it,
    tokens of each prompt; None: a half, a quarter or an eighth of the sample."""
    numbers = random.Random(0)

    def draw(count: int) -> str:
        return " ".join(f"w{numbers.randrange(len(_SPECIAL), _WORDS)}" for _ in range(count))

    def complete(number: int, length: int, draw: Callable[[int], str]) -> dict[str, object]:
        answer = length - 1 - (prompt or max(1, (length - 1) // numbers.choice((2, 4, 8))))
        return {"prompt": draw(length - 1 - answer), "completion": draw(answer)}

    records = ((make_record or complete)(number, length, draw) for number, length in enumerate(lengths))
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def save_model(folder: Path, device: str = "cpu", dtype: str = "float32", kind: str = "llama", **fields: Any) -> None:
    """A model of random weights, untied unless asked. kind: a key of MODELS. The values are those of bf16, so that a
    model in bf16 starts from the same."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of files that take no time
    torch.manual_seed(0)
    model_type, own = MODELS[kind]
    config = AutoConfig.for_model(model_type, **_TOKENS, **{"tie_word_embeddings": False} | own | fields)
    auto: Any = AutoModelForSequenceClassification if kind == "classifier" else AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    save_tokenizer(folder)


def save_adapter(folder: Path, model_folder: Path) -> None:
    """A peft folder in which every matrix is random, so that each has a gradient; on the experts of a mixture too."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, trust_remote_code=False)
    stacks = {".".join(name.split(".")[-3:]) for name, parameter in model.named_parameters() if parameter.ndim == 3}
    options = LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM",
        target_parameters=sorted(stacks) or None,
    )  # fmt: skip
    get_peft_model(model, options).save_pretrained(folder)


def read_samples(path: Path) -> Iterator[tuple[list[int], list[int], float]]:
    """The input ids and labels of each sample of a tokenized folder, and its own label; 0 for data without."""
    from data.storage.tokenized import TokenizedDataset

    dataset = TokenizedDataset(path, True, True)
    for index in range(len(dataset)):
        label = 0.0 if dataset.sample_labels is None else float(dataset.sample_labels[index, 0])
        yield dataset.input_ids(index).tolist(), dataset.labels(index).tolist(), label


def main() -> None:
    folder, device, dtype, fields = sys.argv[1:]
    save_model(Path(folder), device, dtype, **json.loads(fields))


if __name__ == "__main__":
    main()
