"""Data sets for studies and examples: found on this machine, never fetched."""
