"""`plan=...`: the command, the report of a plan, and the timeline of a step."""
