"""The search for the fastest plan that fits: explore, solve, compose, certify; and what it explains."""
