"""Capabilities that most runs do not use, one folder each (`extension.py` at the top says how they are found)."""
