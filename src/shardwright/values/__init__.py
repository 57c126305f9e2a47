"""Which part of a parameter a rank holds, and the values it begins with."""
