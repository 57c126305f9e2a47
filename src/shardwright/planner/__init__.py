<<<<<<< HEAD
"""The planner: which layout, storage and recomputation make a step fastest within a memory limit, and the proof."""
=======
"""Which layout suits which machine: so far what the machine does, measured (``shardwright profile``)."""
>>>>>>> hprof
