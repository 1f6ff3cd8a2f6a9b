"""Optimizers: parameter groups, learning rates, kinds of state."""
