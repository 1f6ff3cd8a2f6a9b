"""Tensor parallelism: shards of tensors, the plan of what is sharded, and the layers that communicate."""
