"""Training data that are tokenized while they are trained on: `data.streaming=true`."""
