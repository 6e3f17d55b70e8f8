"""Imports go one way, along the chain in CONTRIBUTING.md.

Nothing optional comes with `import grapnet`, and private parts of torch come through `_torch` only.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import grapnet

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "grapnet"
CODE = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
# Every part imports what stands left of it, and itself. The last two are programs, which nothing
# else imports and which use public names: see PROGRAMS.
CHAIN = (
    "core ← execution ← network ← following ← spaces ← {rules, convert, continual} ← checkpoint"
    " ← {integrations, plot} ← cli"
)
PARTS = [re.findall(r"\w+", link.replace("network", "_network")) for link in CHAIN.split(" ← ")]
BELOW = {"_torch", "_atomic"}
MAY_IMPORT: dict[str, set[str]] = {"_torch": set(), "_atomic": set()}
for place, parts in enumerate(PARTS[:-2]):
    for part in parts:
        MAY_IMPORT[part] = BELOW.union(*PARTS[:place], {part})
# Rules prepare edits, and leave what follows them to others; streams and memories know no spaces.
MAY_IMPORT["rules"].remove("following")
MAY_IMPORT["continual"].remove("spaces")
OUTSIDE = {"torch", "numpy"}
# imported only where Triton is
_WITH_TRITON = ("_gpu", "_gpu_blocks", "_gpu_live", "_gpu_tiles")
ONLY_IN = {f"grapnet.execution.{name}": {"triton"} for name in _WITH_TRITON}
ONLY_IN["grapnet.checkpoint._file"] = {"safetensors"}
LAZY = {  # imported when a function is called
    "grapnet._network": {"grapnet.integrations.networkx", "networkx", "grapnet._show"},
}
PUBLIC = tuple(
    f"grapnet.{name}"
    for name in (
        "_atomic",
        "_torch",
        "rules",
        "convert",
        "following",
        "continual",
        "execution",
        "plot",
        "spaces",
    )
)
# Parts of which programs use nothing but PUBLIC names.
PRIVATE = MAY_IMPORT.keys() - {"convert", "checkpoint"}
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
    assert {name.split(".")[1] for name, _ in modules()} >= MAY_IMPORT.keys()
    contributing = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert f"`{CHAIN}`" in contributing
    wrong = [line for name, path in modules() for line in violations(path.read_text(), name)]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        (
            "grapnet.core._edit",
            "from grapnet.execution._plan import Plan",
            "grapnet.execution._plan",
        ),
        ("grapnet.core._edit", "def f():\n    import scipy.sparse", "scipy.sparse"),
        (
            "grapnet.core._edit",
            "if TYPE_CHECKING:\n    from grapnet.following._optimizers import attach",
            "grapnet.following._optimizers",
        ),
        ("grapnet.rules._grow", "from ..following import optimizers", "grapnet.following"),
        ("grapnet.convert._graft", "from grapnet.rules import GrowWidth", "grapnet.rules"),
        ("grapnet.checkpoint._net", "from grapnet.plot import graph", "grapnet.plot"),
    ],
)
def test_a_wrong_import_would_be_found(module: str, source: str, named: str) -> None:
    assert violations(source, module) == [f"{module} imports {named}"]


# what is numbered by layer or by transition
NUMBERED = {"layers", "transitions", "sizes", "rosters", "topologies"}


def computed_numbers(source: str) -> list[str]:
    """Returns where a number of a layer or transition is computed from another: `layers[t + 1]`,
    `layers.get(t + 1)`, `f"layers.{t + 1}.bias"`.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        numbers: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and _last_name(node.value) in NUMBERED:
            numbers.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get" and _last_name(node.func.value) in NUMBERED:
                numbers += node.args[:1]
        elif isinstance(node, ast.JoinedStr):
            for before, part in pairwise(node.values):
                text = getattr(before, "value", "")
                if isinstance(part, ast.FormattedValue) and str(text).endswith(
                    ("layers.", "transitions.")
                ):
                    numbers.append(part.value)
        found += [ast.unparse(node) for number in numbers if isinstance(number, ast.BinOp)]
    return found


def _last_name(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def test_transitions_are_asked_for_their_ends() -> None:
    assert computed_numbers("net.layers[t + 1]; sizes[n - 1]") == [
        "net.layers[t + 1]",
        "sizes[n - 1]",
    ]
    assert computed_numbers("change.layers.get(t + 1)") == ["change.layers.get(t + 1)"]
    assert computed_numbers("f'layers.{t + 1}.bias'") == ["f'layers.{t + 1}.bias'"]
    assert computed_numbers("net.layers[transition.target]; net.layers[1 : n + 1]") == []
    sources = {name: path.read_text() for name, path in modules()}
    sources |= {str(path): path.read_text() for path in (ROOT / "tools").rglob("*.py")}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for number, block in enumerate(CODE.findall(page.read_text())):
            sources[f"{page}, block {number}"] = block
    found = {name: computed_numbers(source) for name, source in sources.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


# Private attributes that torch sets on objects of other classes, or when something is compiled.
SET_BY_TORCH = {
    "_ddp_params_and_buffers_to_ignore",
    "_fsdp_flattened",
    "_in_backward_optimizers",
    "_is_param",
    "_metadata",
    "_orig_mod",
}
# The dicts of the parts of a module, and the methods that a module is meant to override.
OF_EVERY_MODULE = {
    "_parameters",
    "_buffers",
    "_modules",
    "_apply",
    "_load_from_state_dict",
    "_save_to_state_dict",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_attributes() -> set[str]:
    """Returns the names of the private attributes of torch's objects, without those that classes of
    the package have too.
    """
    parameter = torch.nn.Parameter(torch.ones(1))
    objects = [
        parameter,
        parameter.exp().grad_fn,
        torch.nn.Conv2d(1, 1, 1),
        torch.nn.BatchNorm1d(1),
        torch.nn.MultiheadAttention(1, 1),
        torch.optim.Adam([parameter]),
        torch.amp.GradScaler("cpu"),
        torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)),
    ]
    found = {name for each in objects for name in dir(each) if is_private(name)}
    for name, path in modules():
        if name != "grapnet._torch":
            found -= own_attributes(path.read_text())
    operators = {name for name in found if hasattr(torch.ops.aten, name)}
    return (found | SET_BY_TORCH) - OF_EVERY_MODULE - operators


def own_attributes(source: str) -> set[str]:
    """Returns the attributes that the classes of a file define, or set on themselves."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            if owner == "self":
                found.add(node.attr)
    return found


def private_of_torch(source: str, attributes: Collection[str] = SET_BY_TORCH) -> set[str]:
    """Returns the private names of torch's modules and objects that a file spells out."""
    found = set()
    # What the names that are imported from torch stand for.
    meanings = {}
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            meanings |= {
                alias.asname or alias.name: name
                for alias, name in zip(node.names, names, strict=True)
            }
        elif isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split("(")[0].split(".")
            names = [".".join([meanings.get(first, first), *rest])]
            if node.attr in attributes:
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in attributes:
            found.add(str(node.value))
        for name in names:
            top, *rest = name.split(".")
            if top == "torch" and any(map(is_private, rest)):
                found.add(name)
    return found


def test_private_names_of_torch_are_in_one_file() -> None:
    attributes = private_attributes()
    assert {"_forward_hooks", "_sequence_nr", "_optimizer_step_pre_hooks"} <= attributes
    found = {name: private_of_torch(path.read_text(), attributes) for name, path in modules()}
    assert found.pop("grapnet._torch")
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import _current_graph_task_id",
        "from torch.utils import _pytree as pytree",
        "def f():\n    return torch.autograd._get_sequence_nr()",
        "from torch import nn\nnn.modules.conv._ConvNd",
        "tensor._is_param = True",
        "getattr(model, '_orig_mod', model)",
    ],
)
def test_a_private_name_of_torch_would_be_found(source: str) -> None:
    assert private_of_torch(source)


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
            if name != folder and (name in PRIVATE or not hasattr(grapnet, name))
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
        "from grapnet.core._graph import Graph\nfrom grapnet import _network", folder
    ) == [
        "_network",
        "core",
    ]
    assert private("from grapnet.rules._rewire import Rewire", folder) == ["rules"]


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


def test_help_version_and_wrong_arguments_of_the_command_do_not_import_torch() -> None:
    program = """
import sys
from importlib.metadata import entry_points

(command,) = entry_points(group="console_scripts", name="grapnet")
codes = []
for words in (["--version"], ["--help"], ["inspect"], ["inspect", "--no-such-option"]):
    sys.argv = ["grapnet", *words]
    try:
        codes.append(command.load()() or 0)
    except SystemExit as end:
        codes.append(end.code or 0)
assert codes == [0, 0, 2, 2]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)
