"""What a net computes, and how far that is from its reference."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import grapnet as gn
from tests.rounding import bounds

BATCHES = (1, 7, 256)


def inputs(net: gn.GrapNet, *leading: int) -> Tensor:
    """Returns an input with these leading dimensions, the same numbers for every dtype and device.

    It is not centred, so that no sum over a batch is small beside its parts.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*leading, len(net.layers[0]), generator=generator) + 0.5
    return x.to(net.device, net.transitions[0].weight.dtype)


def results(
    net: gn.GrapNet, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns the output, and the gradients of x and of every Parameter for a fixed gradient of the
    output; `forward` computes it in another way than the net does.
    """
    x = x.detach().requires_grad_()
    if forward is None:
        forward = net
    output = forward(x)
    named = {"x": x, **dict(net.named_parameters())}
    gradients = torch.autograd.grad(
        output, list(named.values()), slope(output), materialize_grads=True
    )
    return {
        "output": output.detach(),
        **{f"∂{name}": g for name, g in zip(named, gradients, strict=True)},
    }


def slope(output: Tensor) -> Tensor:
    """Returns the gradient that arrives at an output."""
    return (torch.rand(output.shape, generator=torch.Generator().manual_seed(5)) + 0.5).to(output)


def reference_of(net: gn.GrapNet) -> gn.GrapNet:
    """Returns a copy that computes the same numbers in float64 with the reference."""
    twin = copy.deepcopy(net).double()
    twin.execution.use("reference")
    return twin


def differences(
    found: dict[str, Tensor], wanted: dict[str, Tensor]
) -> Iterator[tuple[str, float, float]]:
    """Returns for every tensor its name, the largest absolute difference and the largest value
    wanted.
    """
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        mine = found[name]
        assert mine.shape == right.shape, name
        off = (mine.double() - right.double()).abs()
        yield name, _largest(off), _largest(right)


def require_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Asserts that results in float64 differ by 1e-12 at most."""
    for name, off, largest in differences(found, wanted):
        assert off <= 1e-12, f"{name} is off by {off:.2e}, its largest value is {largest:.2e}"


def require_reference(net: gn.GrapNet, *inputs: Tensor) -> None:
    """Asserts that a net computes what its reference computes, values and gradients, and that it is
    sound.

    In float64 they agree to 1e-12, in float32 to what rounding may do.
    """
    gn.check(net)
    reference = reference_of(net)
    for x in inputs:
        found = results(net, x)
        wanted = results(reference, x.double())
        if x.dtype == torch.float64:
            require_close(found, wanted)
            continue
        allowed = bounds(net, x, slope(found["output"]))
        for name, off, _ in differences(found, wanted):
            assert off <= allowed[name], (
                f"{name} is off by {off:.2e}, rounding by {allowed[name]:.2e}"
            )


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
