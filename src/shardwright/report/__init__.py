"""Terminal tables of what a trace tells, and the same numbers as plain data for ``--json``."""
