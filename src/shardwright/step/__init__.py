"""One training step: forward, loss, backward for each micro-batch, the gradients' norm, AdamW."""
