"""Model families: one rule table each, from a config to sites. A new family is one file beside llama.py."""
