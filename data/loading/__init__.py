"""From rows on disk to the micro-batches of a stage."""
