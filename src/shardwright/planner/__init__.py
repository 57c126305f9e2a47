"""The planner: what a machine does, measured; what fits and is fastest; and the proof that a rehearsal gives."""

SECONDS = 20.0
"""How long structures are priced, unless more is asked for."""
