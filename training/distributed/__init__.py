"""This process among the others: ranks, axes, device, signals, the watchdog, transfers between two ranks."""
