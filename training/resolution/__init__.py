"""From a checked config and a model's architecture to everything that follows from them, before a weight is read."""
