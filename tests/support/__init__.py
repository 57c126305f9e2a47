"""What stands in for something that this machine has not."""
