"""A library that was installed without a compiler runs, and warns once where that makes it slow."""

import subprocess
import sys

PROGRAM = """
import sys
import warnings

sys.modules["grapnet.execution._kernels"] = None  # importing it fails, as without a compiler
import torch
import grapnet as gn

def warned(net, batch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(torch.randn(batch, net.sizes[0]))
    return len(caught)

print(warned(gn.GrapNet([64, 32]), 8))
print(warned(gn.GrapNet([1024, 1024], density=0.01), 256))
print(warned(gn.GrapNet([1024, 1024], density=0.01), 256))
"""


def test_one_warning_for_the_first_sparse_net() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "0"]
