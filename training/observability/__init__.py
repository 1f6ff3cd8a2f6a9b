"""What a run really does: time per stage, telemetry, metrics, loggers, the first number that is not finite."""
