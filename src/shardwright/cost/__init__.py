"""Cost: what a site's products move and keep, as pure formulas (no tensor, no process group)."""

from shardwright.cost.volume import Move, Volume, site_volume

__all__ = ["Move", "Volume", "site_volume"]
