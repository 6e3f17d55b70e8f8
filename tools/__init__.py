"""Programs for the maintainers of the library."""
