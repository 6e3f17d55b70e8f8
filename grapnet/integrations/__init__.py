"""Adapters to other libraries: one file an ecosystem, each an optional extra, imported only when
asked for.
"""
