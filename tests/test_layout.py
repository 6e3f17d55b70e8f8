"""The import rule: core ← execution ← network ← {following, rules} ← continual.

Nothing optional comes with `import grapnet`.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import grapnet

PACKAGE = Path(__file__).parent.parent / "grapnet"
MAY_IMPORT = {
    "core": {"core"},
    "execution": {"core", "execution"},
    "network": {"core", "execution", "network"},
    "following": {"core", "execution", "network", "following"},
    "continual": {"core", "execution", "network", "following", "continual"},
    "rules": {"core", "execution", "network", "rules"},
}
OUTSIDE = {"torch", "numpy"}
# imported only where Triton is
ONLY_IN = {f"grapnet.execution.{name}": {"triton"} for name in ("gpu", "gpu_blocks")}
LAZY = {  # imported when a function is called
    "grapnet.network": {"grapnet.integrations.networkx", "networkx", "grapnet.show"},
}
PUBLIC = tuple(
    f"grapnet.{name}"
    for name in (
        "_atomic",
        "rules",
        "convert",
        "following",
        "continual",
        "plot",
    )
)
PROGRAMS = ("studies", "integrations", "benchmarks", "examples", "plot", "cli")
OPTIONAL = (
    "sklearn",
    "scipy",
    "matplotlib",
    "pytest",
    "hypothesis",
    "pandas",
    "transformers",
    "lightning",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "networkx",
    "joblib",
    "pooch",
)


def imports(source: str, module: str) -> set[str]:
    """Returns the absolute names of every module a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= (
                {f"{name}.{alias.name}" for alias in node.names}
                if name == "grapnet" or not node.module
                else {name}
            )
    return found


def violations(source: str, module: str) -> list[str]:
    """Returns what a module of the package imports and should not."""
    part = module.split(".")[1]
    if part not in MAY_IMPORT:
        return []
    wrong = []
    for name in sorted(imports(source, module)):
        top, *rest = name.split(".")
        inside = (
            top == "grapnet" and bool(rest) and rest[0] in MAY_IMPORT[part]
        ) or name in LAZY.get(module, ())
        if (
            not inside
            and top not in OUTSIDE | ONLY_IN.get(module, set())
            and top not in sys.stdlib_module_names
        ):
            wrong.append(f"{module} imports {name}")
    return wrong


def modules() -> list[tuple[str, Path]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [
        (".".join(["grapnet", *path.relative_to(PACKAGE).with_suffix("").parts]), path)
        for path in paths
    ]


def test_every_module_imports_only_what_lies_below_it() -> None:
    assert {name.split(".")[1] for name, _ in modules()} >= {
        "core",
        "execution",
        "network",
        "following",
        "continual",
    }
    wrong = [line for name, path in modules() for line in violations(path.read_text(), name)]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        ("grapnet.core._edit", "from grapnet.execution.plan import Plan", "grapnet.execution.plan"),
        ("grapnet.core._edit", "from ..execution import plan", "grapnet.execution"),
        ("grapnet.core._edit", "from .. import network", "grapnet.network"),
        ("grapnet.core._edit", "import grapnet", "grapnet"),
        ("grapnet.core._edit", "def f():\n    import scipy.sparse", "scipy.sparse"),
        (
            "grapnet.core._edit",
            "if TYPE_CHECKING:\n    from grapnet.following.optimizers import attach",
            "grapnet.following.optimizers",
        ),
        ("grapnet.execution.dense", "from grapnet import GrapNet", "grapnet.GrapNet"),
        ("grapnet.execution.dense", "from ..network import GrapNet", "grapnet.network"),
        ("grapnet.continual.memories", "from grapnet.rules.grow import Grow", "grapnet.rules.grow"),
        ("grapnet.rules.grow", "from ..following import optimizers", "grapnet.following"),
        (
            "grapnet.network",
            "from .following.optimizers import attach",
            "grapnet.following.optimizers",
        ),
    ],
)
def test_a_wrong_import_would_be_found(module: str, source: str, named: str) -> None:
    assert violations(source, module) == [f"{module} imports {named}"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "grapnet.core._edit",
            "import torch\nfrom .errors import EditError\nimport numpy as np\nimport weakref",
        ),
        (
            "grapnet.execution.plan",
            "from grapnet.core._transition import Topology\nfrom .reference import walk",
        ),
        (
            "grapnet.network",
            "from .core.graph import Graph\nfrom .execution.manager import Execution",
        ),
        (
            "grapnet.following.optimizers",
            "from grapnet.core._graph import Graph\nfrom grapnet.network import GrapNet",
        ),
        (
            "grapnet.checkpoint.graph",
            "from grapnet.network import GrapNet\nfrom grapnet.following.optimizers import attach",
        ),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert violations(source, module) == []


def private(source: str, folder: str) -> list[str]:
    """Returns what a program imports from inside the package, other than public names and its own
    folder.
    """
    found = imports(source, f"grapnet.{folder}.program")
    public = (*PUBLIC, *(name for name in found if name.startswith("grapnet.integrations.")))
    inside = [
        name.split(".")[1] for name in found if name.startswith("grapnet.") and name not in public
    ]
    return sorted(
        {
            name
            for name in inside
            if name != folder and (name in MAY_IMPORT or not hasattr(grapnet, name))
        }
    )


@pytest.mark.parametrize("folder", PROGRAMS)
def test_programs_use_public_names_only(folder: str) -> None:
    paths = [*(PACKAGE / folder).rglob("*.py"), *(PACKAGE.parent / folder).rglob("*.py")]
    assert {path: wrong for path in paths if (wrong := private(path.read_text(), folder))} == {}
    assert (
        private(
            "import grapnet as gn\nfrom grapnet import GrapNet, attach\nfrom .timing import median",
            folder,
        )
        == []
    )
    assert private("from grapnet.rules import Every\nfrom studies.data import load", folder) == []
    assert private(
        "from grapnet.core._graph import Graph\nfrom grapnet import network", folder
    ) == [
        "core",
        "network",
    ]
    assert private("from grapnet.rules.rewire import Rewire", folder) == ["rules"]


def test_importing_grapnet_is_quiet_keeps_global_state_and_imports_nothing_optional() -> None:
    program = """
import sys
import torch

def state():
    return torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype()

torch.manual_seed(0)
before = state()
import grapnet
grapnet.GrapNet
assert state() == before
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    loaded = set(done.stdout.split())
    assert {"grapnet", "torch", "numpy", "safetensors"} <= loaded
    assert loaded & set(OPTIONAL) == set()


def test_importing_grapnet_loads_torch_with_the_first_public_name() -> None:
    program = """
import sys
import grapnet as gn

assert gn.__version__
assert not hasattr(gn, "__wrapped__")
assert "torch" not in sys.modules
assert "GrapNet" in dir(gn)
assert "torch" in sys.modules
names = {}
exec("from grapnet import *", names)
assert names["GrapNet"] is gn.GrapNet
assert names["rules"] is gn.rules
assert gn.rules.PruneWeakest and gn.continual.ReservoirMemory
assert not hasattr(gn, "nonsense")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
