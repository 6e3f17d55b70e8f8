"""Backends and plans: they run the graph."""
