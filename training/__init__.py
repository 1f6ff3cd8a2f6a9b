"""Training: the run's configuration, its layout over ranks, the pipeline module, the loop, checkpoints and metrics."""
