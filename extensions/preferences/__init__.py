"""Preferences: pairs of answers of which one was preferred, and single answers that were liked or not."""
