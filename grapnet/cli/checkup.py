"""A check of the library on this machine: a tiny net is built, edited, taken back, run by every
backend and saved.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import grapnet as gn
from grapnet.execution.plans import BACKENDS

_TOLERANCE = 1e-10  # of sums of a few dozen float64 products in another order


def check_up(device: torch.device) -> dict[str, str]:
    """Returns what is wrong, by the name of each step; an empty text where nothing is."""
    found = {}
    for name, step in STEPS.items():
        try:
            found[name] = step(device)
        except Exception as error:  # a broken installation may fail in any way
            found[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return found


def small_net(device: torch.device) -> gn.GrapNet:
    """Returns a net of every kind of relation: shared children, none, some frozen."""
    net = gn.GrapNet(
        [8, 6, 4], dtype=torch.float64, device=device, generator=torch.Generator().manual_seed(0)
    )
    with net.edit(reason="thin out and grow") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.6))
        nodes = edit.add_nodes(1, 3, owner="grown")
        edit.connect(net.layers[0][:2], nodes)
        edit.connect(nodes, net.layers[2])
        edit.freeze(net.layers[1][:2])
    gn.check(net)
    return net


def _edits(device: torch.device) -> str:
    net = small_net(device)
    before, version = _state(net), net.version
    with net.edit(reason="cut what was grown") as edit:
        edit.cut(net.select(owner="grown").outgoing())
    if torch.equal(net.transitions[1].ptr, before["transitions.1.ptr"]):
        return "a cut left the relations as they were"
    net.undo()
    gn.check(net)
    after = _state(net)
    wrong = [name for name, value in before.items() if not torch.equal(value, after[name])]
    if wrong or net.version != version + 2:
        return f"undo did not bring {', '.join(wrong) or 'the version'} back"
    return ""


def _backends(device: torch.device) -> str:
    net, x = (
        small_net(device),
        torch.linspace(-1, 1, 5 * 8, dtype=torch.float64).view(5, 8).to(device),
    )
    with torch.no_grad():
        expected = net.walk(x)
    weights = list(net.parameters())
    net.execution.use("reference")
    gradients = torch.autograd.grad(net(x).square().sum(), weights)
    for name in runnable(net):
        net.execution.use(name)
        z = net(x)
        found = torch.autograd.grad(z.square().sum(), weights)
        if not _agree(z, expected):
            return f"{name} computes other values than Algorithm 1, node by node"
        if not all(map(_agree, found, gradients)):
            return f"{name} computes other gradients than the reference"
    return ""


def runnable(net: gn.GrapNet) -> list[str]:
    """Returns the backends that can run every transition of a net here."""
    refused = {name for row in net.execution.describe() for name in row["refused"]}
    return [name for name in BACKENDS if name not in refused]


def _optimizers(device: torch.device) -> str:
    net = small_net(device)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    for _ in range(2):
        net(torch.ones(2, 8, dtype=torch.float64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with net.edit(reason="thin out") as edit:
            edit.cut(net.layers[0].outgoing().smallest(fraction=0.1))
    moments = optimizer.state[net.transitions[0].weight]["exp_avg"]
    return (
        ""
        if moments.shape == net.transitions[0].weight.shape
        else "an optimizer did not follow an edit"
    )


def _files(device: torch.device) -> str:
    net = small_net(device)
    with tempfile.TemporaryDirectory(prefix="grapnet-") as folder:
        gn.save(Path(folder) / "net.safetensors", net)
        loaded = _state(gn.load(Path(folder) / "net.safetensors", device=device))
    wrong = [name for name, value in _state(net).items() if not torch.equal(value, loaded[name])]
    return f"a checkpoint brought other values of {', '.join(wrong)}" if wrong else ""


def _state(net: gn.GrapNet) -> dict[str, Tensor]:
    return {
        name: value.clone() for name, value in net.state_dict().items() if isinstance(value, Tensor)
    }


def _agree(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.detach(), b.detach(), rtol=0, atol=_TOLERANCE)  # which NaN never is


STEPS: dict[str, Callable[[torch.device], str]] = {
    "edit and undo": _edits,
    "backends agree": _backends,
    "optimizer follows": _optimizers,
    "save and load": _files,
}
