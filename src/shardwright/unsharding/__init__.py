"""Sharded parameters in modules that know nothing of them: hooks that unshard around each forward."""
