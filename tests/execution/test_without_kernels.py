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
net = gn.GrapNet([64, 64], density=0.5, tile=16)
x = torch.randn(3, 64)
net.execution.use("reference")
expected = net(x)
for backend in ("dense", "family", "tiles"):
    net.execution.use(backend)
    print(torch.allclose(net(x), expected, atol=1e-5))
"""


def test_one_warning_for_the_first_sparse_net_and_other_backends_run() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "0", "True", "True", "True"]
