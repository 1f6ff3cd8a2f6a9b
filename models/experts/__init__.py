"""Mixtures of experts: how tokens reach their experts, what those compute, what is asked of the router."""
