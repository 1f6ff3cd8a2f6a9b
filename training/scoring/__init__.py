"""Passes that score samples without training on them: by a reference model, or before a step."""
