"""Rehearsals of many blocks from rehearsals of a few: periodic segments, repeated event by event."""
