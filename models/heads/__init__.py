"""Heads in place of the LM head, one file each."""
