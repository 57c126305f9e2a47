"""Cost: what a site's products move and keep, as pure formulas (no tensor, no process group)."""

from shardwright.cost.bounds import Grid, best_grid, lower_bound
from shardwright.cost.conversion import attention_moves, conversion_moves
from shardwright.cost.place import Move
from shardwright.cost.volume import Volume, site_volume

__all__ = ["Grid", "Move", "Volume", "attention_moves", "best_grid", "conversion_moves", "lower_bound", "site_volume"]
