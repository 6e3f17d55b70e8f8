"""Rules: what changes the structure of a net, outside of its core."""
