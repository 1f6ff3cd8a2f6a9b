"""Tokens on disk: tokenized once, memory-mapped ever after, and the rows made of them."""
