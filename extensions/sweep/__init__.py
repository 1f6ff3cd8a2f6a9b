"""`--multirun`: a run for each combination of values."""
