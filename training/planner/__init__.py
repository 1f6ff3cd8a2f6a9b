"""The plan of a run before it is paid for: memory, time and bytes as a sum of cost terms."""
