"""The integer program: the fastest assignment of options to blocks within the memory."""
