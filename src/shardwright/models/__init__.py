"""A model made parallel: built, its modules swapped for layers on the grid, its forward's surroundings checked."""
