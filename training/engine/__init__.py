"""A training step. `engine.py` is the interface; its implementation is the one place that knows DeepSpeed."""
