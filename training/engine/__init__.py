"""A training step. `engine.py` is the interface; what is behind it is the one place that knows DeepSpeed."""
