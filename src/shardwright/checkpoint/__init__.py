"""Checkpoints that every layout reads, and Hugging Face files in and out. No pickle anywhere."""
