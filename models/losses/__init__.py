"""Losses computed from hidden states and the head's weight, logits a piece at a time."""
