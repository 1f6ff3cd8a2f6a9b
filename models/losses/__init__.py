"""Losses computed from hidden states and the head's weight, with logits in chunks."""
