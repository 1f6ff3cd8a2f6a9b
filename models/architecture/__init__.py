"""Looks up the layers of the model that a config of `transformers` describes, and the names of their weights."""
