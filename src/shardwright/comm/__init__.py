"""Communication: groups by ranks, collectives logged where they are called, what ranks agree on before them."""
