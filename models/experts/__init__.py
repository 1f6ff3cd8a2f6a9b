"""Mixtures of experts: dispatching tokens to their experts, the experts' products, and the routers' losses."""
