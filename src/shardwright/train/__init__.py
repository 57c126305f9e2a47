"""Training: the run file, data, checkpoints and the loop that torchrun starts."""
