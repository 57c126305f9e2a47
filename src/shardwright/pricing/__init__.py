"""What a structure costs: short rehearsals composed to a whole step, and lower bounds on it."""
