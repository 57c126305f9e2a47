"""Which layout suits which machine: so far what the machine does, measured (``shardwright profile``)."""
