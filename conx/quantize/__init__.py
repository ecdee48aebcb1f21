"""Which codes stand for a tensor: grids, palettes, and the choice between them. NumPy only."""
