"""Tensor and context parallelism on tensors: shards, sums over ranks, exchanges, and the modules that communicate."""
