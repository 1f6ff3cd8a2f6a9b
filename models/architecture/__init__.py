"""From a config of `transformers` to the layers of its model, and to the names that their weights have on disk."""
