"""Distillation: a student learns from the probabilities that a teacher gives the next token."""
