"""Checkpoints: their content, writing them so that none is ever incomplete, and finding the newest complete one."""
