"""Tokens on disk: tokenized once, memory-mapped afterwards, and the rows made of them."""
