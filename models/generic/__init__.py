"""Families without a file in models/: layers built from the model's parts in `transformers`, and the proof that these
layers compute the same as the model."""
