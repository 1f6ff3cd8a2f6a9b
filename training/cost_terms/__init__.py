"""Cost terms: the memory and time that each aspect of a run adds; `table.py` lists them all."""
