"""Several threads run one net at the same time, through the same plans."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

import grapnet as gn

THREADS = 4
PASSES = 200  # of every thread
BACKENDS = ["reference", "dense", "family", "sparse", "attention", "auto"]


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Lets threads take turns within a pass, not after a hundred of them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def run_together(run: Callable[[Tensor], Tensor], inputs: list[Tensor], passes: int) -> int:
    """Returns how many passes of all threads together gave other bits than a single thread gets.

    Every thread goes through the inputs in an order of its own.
    """
    together = Barrier(THREADS)

    def expect() -> list[Tensor]:
        with torch.no_grad():
            return [run(x).clone() for x in inputs]

    def repeat(first: int) -> int:
        wrong = 0
        together.wait()
        with torch.no_grad():
            for n in range(first, first + passes):
                number = n % len(inputs)
                found = run(inputs[number])
                time.sleep(0)  # the turn of another thread, which must not change this result
                wrong += not torch.equal(found, expected[number])
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        expected = pool.submit(expect).result()
        return sum(pool.map(repeat, range(THREADS)))


def drawn_net(sizes: list[int], density: float, backend: str) -> gn.GrapNet:
    torch.manual_seed(0)
    net = gn.GrapNet(sizes, density=density)
    net.execution.use(backend)
    return net


# Rectangles of large transitions are written by a kernel, and activations come from spare memory.
LARGE = ([256, 600, 64], [450, 460], 10)
SMALL = ([24, 40, 30, 8], [1, 3, 8, 33], PASSES)


@pytest.mark.parametrize(
    ("backend", "case"),
    [*((backend, SMALL) for backend in BACKENDS), ("dense", LARGE), ("sparse", LARGE)],
)
def test_threads_that_run_one_net_do_not_disturb_each_other(
    backend: str, case: tuple[list[int], list[int], int]
) -> None:
    sizes, batches, passes = case
    net = drawn_net(sizes, 0.3, backend)
    inputs = [torch.randn(batch, sizes[0]) for batch in batches]
    assert run_together(net, inputs, passes) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_make_the_first_plans_together(backend: str) -> None:
    inputs = [torch.randn(batch, 24) for batch in (1, 3, 8, 33)]
    for _ in range(5):
        net = drawn_net([24, 40, 8], 0.4, backend)
        twin = drawn_net([24, 40, 8], 0.4, backend)
        with torch.no_grad():
            for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
                other.copy_(mine)
            expected = [net(x) for x in inputs]
        together = Barrier(THREADS)

        def run(number: int, net: gn.GrapNet = twin, together: Barrier = together) -> Tensor:
            together.wait()
            with torch.no_grad():
                return net(inputs[number])

        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(run, range(THREADS)))
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other)


def test_a_run_that_keeps_its_result_is_noticed() -> None:
    net = drawn_net([24, 40, 8], 0.4, "auto")
    kept = torch.zeros(33, 8)

    def run(x: Tensor) -> Tensor:
        kept[: len(x)] = net(x)
        return kept[: len(x)]

    assert run_together(run, [torch.randn(33, 24) for _ in range(4)], PASSES) > 0
