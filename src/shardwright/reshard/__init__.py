"""Conversions between the layouts of two sites: tokens to features, tokens to heads, and back."""
