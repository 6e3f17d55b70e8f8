"""Without its library an integration says what to install, and the rest of GrapNet does not
notice.
"""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

# Imports GrapNet once; each use then runs in a fork of its own, to which the named libraries are
# not there.
PROGRAM = """
import importlib.abc, json, os, sys, tempfile, traceback
import torch
import grapnet as gn

class Absent(importlib.abc.MetaPathFinder):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def use(absent, program):
    assert absent not in sys.modules
    sys.meta_path.insert(0, Absent({absent}))
    exec(program, {"torch": torch, "gn": gn, "net": gn.GrapNet([3, 2])})

def run(absent, program):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1), os.dup2(errors.fileno(), 2)
            code = 0
            try:
                use(absent, program)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), errors.seek(0)
        return code, out.read(), errors.read()

print(json.dumps({name: run(*case) for name, case in json.loads(sys.argv[1]).items()}))
"""

GRAFT = """
from grapnet.integrations.transformers import graft_ffn
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
print(graft_ffn(layer)[0].net.sizes)
print(len(graft_ffn(torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 12)))[0].hidden))
"""
USES = {  # the library that is absent, and what is tried without it
    "sklearn": ("sklearn", "import grapnet.integrations.sklearn"),
    "lightning": ("lightning", "import grapnet.integrations.lightning"),
    "networkx": ("networkx", "net.to_networkx()"),
    "plot": ("matplotlib", "from grapnet import plot; plot.adjacency(net)"),
    "transformers": ("transformers", GRAFT),
    "another": ("scipy", "import grapnet.integrations.sklearn"),
    "nothing": ("none of these", "print(net.to_networkx().number_of_nodes())"),
}
# one worker, so that GrapNet is imported once more and no oftener
pytestmark = pytest.mark.xdist_group("missing")


class Done(NamedTuple):
    """How a use went."""

    code: int
    out: str
    errors: str


@pytest.fixture(scope="module")
def done() -> dict[str, Done]:
    """What came of every use, in processes that had imported GrapNet and nothing of these tests."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(USES)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert found.returncode == 0, found.stderr
    return {name: Done(*said) for name, said in json.loads(found.stdout).items()}


@pytest.mark.parametrize("extra", ["sklearn", "lightning", "networkx", "plot"])
def test_the_error_names_the_install(done, extra):
    last = done[extra].errors.strip().splitlines()[-1]
    assert done[extra].code == 1
    assert last.startswith("ImportError")
    assert last.endswith(f'pip install "grapnet[{extra}]"')


def test_blocks_of_torch_are_grafted_without_transformers(done):
    assert done["transformers"] == (0, "[8, 16, 8]\n12\n", "")


def test_another_missing_library_is_not_blamed_on_the_extra(done):
    assert done["another"].code == 1
    assert "pip install" not in done["another"].errors
    assert "No module named 'scipy" in done["another"].errors


def test_nothing_is_said_where_nothing_is_missing(done):
    assert done["nothing"] == (0, "5\n", "")
