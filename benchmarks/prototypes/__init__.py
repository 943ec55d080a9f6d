"""Designs that were measured and not taken (or not yet): SQL and a driver each, for the pages in docs/adr."""
