"""Stores the graph: layers, relations, edits and the journal."""
