"""Runs on the Hugging Face hub: what is uploaded of them, and the model card that describes it."""
