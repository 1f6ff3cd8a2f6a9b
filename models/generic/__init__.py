"""Families without a file in models/: their layers from the parts of the model that `transformers` has of them, and the
proof that these parts are the model."""
