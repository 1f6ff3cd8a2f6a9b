"""Tensor and context parallelism, applied to the layers of a model."""
