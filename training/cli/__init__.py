"""The command line, and its plan in a process of its own. It runs before torch is imported, so it imports only config
and distributed.
"""
