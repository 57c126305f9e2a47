"""What a site's products move and keep, in bytes, as formulas; independent of the runtime, and its oracle."""
