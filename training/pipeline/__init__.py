"""Layers become stages: the stage module, the split, schedules as pure units, recomputation, what is trained."""
