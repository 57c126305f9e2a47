"""The planner: what a machine does, measured; what fits and is fastest; and the proof that a rehearsal gives."""
