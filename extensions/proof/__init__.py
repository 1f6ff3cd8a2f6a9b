"""`proof=true`: loss and gradients of a small model at a run's layout, against plain transformers in one process."""
