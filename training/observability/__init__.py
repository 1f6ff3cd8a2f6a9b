"""Measurements of a run: time per stage, telemetry, metrics, loggers, the source of a number that is not finite."""
