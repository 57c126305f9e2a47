"""The store of parameters: groups that are gathered, released and reduced together, and their schedule."""
