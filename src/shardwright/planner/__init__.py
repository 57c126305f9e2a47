"""The planner: which layout, storage and recomputation make a step fastest within a memory limit, and the proof."""
