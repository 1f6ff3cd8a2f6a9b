"""Elastic supervision: a run that has lost hosts continues on those that are left."""
