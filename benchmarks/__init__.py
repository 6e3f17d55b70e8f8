"""Benchmarks: each checks that what it times is right, then prints ratios measured side by side."""
