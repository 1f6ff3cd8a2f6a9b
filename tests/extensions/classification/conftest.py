"""Fixtures of tokenizers."""

from support.byte_tokenizers import build_tokenizer, chat_tokenizer, tokenizer  # noqa: F401
