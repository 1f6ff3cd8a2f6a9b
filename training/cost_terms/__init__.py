"""What each aspect of a run adds to memory and time; `table.py` lists them all."""
