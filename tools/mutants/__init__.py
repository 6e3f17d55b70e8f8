"""Mutants: how many small changes of the library its tests notice."""
