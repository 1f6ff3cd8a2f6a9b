"""Weights on disk: reading and writing every form of them, one layer at a time, and converting between them."""
