"""Configs of other trainers, read as ones of this project."""
