"""How far a net is from its reference; `python -m tests.execution.figures` prints the largest differences there are."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import grapnet as gn

from .graphs import BACKEND_NAMES, EDITS, SHAPES, edited

PAPER = {"values": 2.24e-8, "gradients": 1.49e-8}  # the paper's family backend against its reference path, float32
BATCHES = (1, 7, 256)


def inputs(net: gn.GrapNet, *leading: int) -> Tensor:
    """Returns an input with these leading dimensions, the same numbers for every dtype and device.

    It is not centred, so that no sum over a batch is small beside its parts.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*leading, len(net.layers[0]), generator=generator) + 0.5
    return x.to(net.device, net.transitions[0].weight.dtype)


def results(net: gn.GrapNet, x: Tensor) -> dict[str, Tensor]:
    """Returns the output, and the gradients of x and of every Parameter for a fixed gradient of the output."""
    x = x.detach().requires_grad_()
    output = net(x)
    named = {"x": x, **dict(net.named_parameters())}
    gradients = torch.autograd.grad(output, list(named.values()), slope(output))
    return {"output": output.detach(), **{f"∂{name}": g for name, g in zip(named, gradients, strict=True)}}


def slope(output: Tensor) -> Tensor:
    """Returns the gradient that arrives at an output."""
    return (torch.rand(output.shape, generator=torch.Generator().manual_seed(5)) + 0.5).to(output)


def reference_of(net: gn.GrapNet) -> gn.GrapNet:
    """Returns a copy that computes the same numbers in float64 with the reference."""
    twin = copy.deepcopy(net).double()
    twin.execution.use("reference")
    return twin


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """Returns for every tensor its name, the largest absolute difference and the largest value wanted."""
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        mine = found[name]
        assert mine.shape == right.shape, name
        off = (mine.double() - right.double()).abs()
        yield name, _largest(off), _largest(right)


def require_close(
    found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype, *, summands: float = 0.0
) -> None:
    """Asserts ≤ 1e-12 in float64, and in float32 ≤ 1e-6 of the largest value of each tensor.

    A sum whose terms nearly cancel is as far off as its terms are large: none counts as smaller than `summands`.
    """
    for name, off, largest in differences(found, wanted):
        limit = 1e-12 if dtype == torch.float64 else 1e-6 * max(largest, summands)
        assert off <= limit, f"{name} is off by {off:.2e}, its largest value is {largest:.2e}"


def require_reference(net: gn.GrapNet, *inputs: Tensor) -> None:
    """Asserts that a net computes what its reference computes, values and gradients, and that it is sound."""
    gn.check(net)
    coordinates, reference = max(_largest(p.detach()) for p in net.parameters()), reference_of(net)
    for x in inputs:
        require_close(results(net, x), results(reference, x.double()), x.dtype, summands=coordinates)


def grown_head_differences(backend: str, device: str = "cpu") -> dict[str, float]:
    """Returns the absolute differences of a float32 head of 49-240-10, grown task by task, from the float32 reference.

    The comparison nearest to the paper's: a batch of 32, the mean cross-entropy, the gradients of the Parameters.
    """
    torch.manual_seed(0)
    wires = [list(range(2 * (k // 48) + 2)) for k in range(240)]
    parents = [k for k, children in enumerate(wires) for _ in children]
    later = (parents, [child for children in wires for child in children])
    first = (torch.arange(49).repeat_interleave(240), torch.arange(240).repeat(49))
    net = gn.GrapNet.from_relations([49, 240, 10], [first, later], device=device)
    x, target, found = torch.rand(32, 49).to(device), torch.randint(10, (32,)).to(device), []
    for name in (backend, "reference"):
        net.execution.use(name)
        output = net(x)
        loss = torch.nn.functional.cross_entropy(output, target)
        found.append((output.detach(), torch.autograd.grad(loss, list(net.parameters()))))
    (mine, slopes), (right, wanted) = found
    pairs = zip(slopes, wanted, strict=True)
    return {"values": _largest(mine - right), "gradients": max(_largest(a - b) for a, b in pairs)}


def largest_differences(backend: str, dtype: torch.dtype, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Returns the largest differences over all shapes, before and after an edit: absolute, and of the largest value."""
    worst = {"values": (0.0, 0.0), "gradients": (0.0, 0.0)}
    for shape in SHAPES.values():
        net = shape.build(dtype, device)
        net.execution.use(backend)
        for edit in (None, "cut_tenth"):
            if edit:
                edited(net, EDITS[edit])
            for batch in BATCHES:
                x = inputs(net, batch)
                for name, off, largest in differences(results(net, x), results(reference_of(net), x.double())):
                    kind = "values" if name == "output" else "gradients"
                    relative = off / largest if largest else off
                    worst[kind] = max(worst[kind][0], off), max(worst[kind][1], relative)
    return worst


def main(devices: Sequence[str] = ("cpu",)) -> None:
    """Prints one line for every device, backend and dtype."""
    print(f"the paper's family backend, float32: values {PAPER['values']}, gradients {PAPER['gradients']}")
    for device in devices:
        for backend in BACKEND_NAMES:
            nearest = ", ".join(f"{kind} {off:.2e}" for kind, off in grown_head_differences(backend, device).items())
            print(f"{device} {backend:8} float32  grown head, as in the paper: {nearest}")
            for dtype in (torch.float32, torch.float64):
                found = largest_differences(backend, dtype, device)
                columns = [f"{kind} {off:.2e} ({rel:.2e} of the largest)" for kind, (off, rel) in found.items()]
                print(f"{device} {backend:8} {str(dtype)[6:]:8} {', '.join(columns)}")


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


if __name__ == "__main__":
    main(("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
