"""The Triton kernels as operators of torch; they need a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import grapnet as gn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields every operator with inputs for it."""
    from grapnet.execution._gpu import Wiring

    torch.manual_seed(0)
    net = gn.GrapNet([6, 9, 4], density=0.5, device="cuda")
    topology = net.transitions[0].topology
    wiring = Wiring.of(topology)
    x, dz, values, bias = (drawn(*size) for size in ((6, 5), (9, 5), (topology.n_relations,), (9,)))
    yield "gpu_sum", (x, values, bias, *wiring)
    yield "gpu_sum_to_parents", (dz, values, *wiring)
    yield "gpu_dots", (x, dz, *wiring)


def drawn(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.float64, requires_grad=True)


def test_operators_keep_the_rules_of_torch() -> None:
    for name, inputs in calls():
        torch.library.opcheck(getattr(torch.ops.grapnet, name).default, inputs)


def test_derivatives_of_the_first_and_second_order() -> None:
    for name, inputs in calls():
        operator = getattr(torch.ops.grapnet, name).default
        assert gradcheck(operator, inputs)
        assert gradgradcheck(operator, inputs)
