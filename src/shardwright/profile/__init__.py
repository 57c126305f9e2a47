"""What a machine does, measured: collectives, products, memory; written as a cluster file."""
