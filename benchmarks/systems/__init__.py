"""The systems of the comparison: one file each, its settings written down in it."""
