"""Small byte-level BPE tokenizers trained here, so that decoding restores the text exactly."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "How many legs has a spider? A spider has eight legs.",
]
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BuildTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(scope="session")
def build_tokenizer() -> BuildTokenizer:
    """`build_tokenizer(puts_bos=True, pad_token="</s>", ...)`: other arguments go to `PreTrainedTokenizerFast`."""

    def build(puts_bos: bool = False, **options: str | None) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(TEXT, trainer)
        if puts_bos:
            bos = ("<s>", backend.token_to_id("<s>"))
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
        names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | options
        return PreTrainedTokenizerFast(tokenizer_object=backend, **names)

    return build


@pytest.fixture(scope="session")
def tokenizer(build_tokenizer: BuildTokenizer) -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer(build_tokenizer: BuildTokenizer) -> PreTrainedTokenizerFast:
    """ChatML, whose end-of-turn token is the eos token."""
    return build_tokenizer(eos_token="<|im_end|>", chat_template=CHATML)
