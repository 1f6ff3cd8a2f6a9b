"""Weights on disk: reading and writing them in every form, one layer at a time."""
