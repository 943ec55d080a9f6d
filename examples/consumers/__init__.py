"""Consumers that apply each event once, however often the broker delivers it."""
