"""From one form of weights on disk to another."""
