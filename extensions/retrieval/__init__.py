"""Vectors of texts, and scores of documents for a query."""
