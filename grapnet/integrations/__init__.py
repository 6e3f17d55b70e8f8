"""Adapters to other libraries: one file per library, each an optional extra, imported on use."""
