"""Converts weights from one form on disk to another."""
