"""The two ways in which a request can fail without being a bug: bad input, and a model that does not fit."""

BAD_INPUT, DOES_NOT_FIT = 2, 3
"""Exit statuses of commands."""


class InputError(ValueError):
    """Bad input: one line that names the field, what was found and what is allowed. Commands exit with 2."""


class DoesNotFit(Exception):
    """No layout meets the memory limit; the message tells the smallest peak found. Commands exit with 3."""
