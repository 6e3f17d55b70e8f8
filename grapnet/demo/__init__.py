"""The demonstration that `grapnet demo` runs: a net that is grown, cut, undone, frozen, sifted and
saved.
"""
