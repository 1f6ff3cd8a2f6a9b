"""Trackers beside Weights & Biases and TensorBoard: MLflow, SwanLab, Trackio and Comet."""
