"""The grid linear: a matrix product on a mesh. One file for each overlap mode, all with blocking.py's signature."""

from shardwright.linear.grid_linear import GridLinear
from shardwright.linear.site_product import SiteProduct

__all__ = ["GridLinear", "SiteProduct"]
