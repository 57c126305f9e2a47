"""How the products and collectives of a site overlap: one file for each mode, with one signature."""
