"""Classes of documents and of words, and whether each step of an answer is right."""
