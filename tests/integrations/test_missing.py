"""Without its library an integration says what to install, and the rest of GrapNet does not notice."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.abc, sys
import torch
import grapnet as gn

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

assert not {absent!r} & set(sys.modules)
sys.meta_path.insert(0, Absent())
net = gn.GrapNet([3, 2])
{use}
"""

USES = {
    "sklearn": ({"sklearn"}, "import grapnet.integrations.sklearn"),
    "lightning": ({"lightning"}, "import grapnet.integrations.lightning"),
    "networkx": ({"networkx"}, "net.to_networkx()"),
}


def run(absent: set[str], use: str) -> "subprocess.CompletedProcess[str]":
    program = PROGRAM.format(absent=absent, use=use)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("extra", USES)
def test_the_error_names_the_install(extra):
    absent, use = USES[extra]
    done = run(absent, use)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last == (f'ImportError: this needs {extra}, which is not installed. Run: pip install "grapnet[{extra}]"')


def test_blocks_of_torch_are_grafted_without_transformers():
    use = (
        "from grapnet.integrations.transformers import graft_ffn\n"
        "layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "print(graft_ffn(layer)[0].net.sizes)"
    )
    done = run({"transformers"}, use)
    assert (done.returncode, done.stdout) == (0, "[8, 16, 8]\n"), done.stderr


def test_another_missing_library_is_not_blamed_on_the_extra():
    done = run({"scipy"}, "import grapnet.integrations.sklearn")
    assert done.returncode == 1
    assert "pip install" not in done.stderr
    assert "No module named 'scipy" in done.stderr
