"""torch.compile around an adopted model whose sizes change."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import grapnet as gn
from grapnet.spaces import Adopted, dynamic_sizes


def compiled_sizes(edits: int, dynamic: bool) -> list[int]:
    """Returns how often a model was compiled after each of several edits."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 9, 4)
    )
    x = torch.randn(2, 3, 5, 5)
    net = gn.adopt(model, x)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    counts = []
    for _ in range(edits):
        if dynamic:
            with dynamic_sizes():
                out = compiled(x)
        else:
            out = compiled(x)
        assert torch.equal(out, model(x))
        counts.append(len(graphs))
        with net.edit(reason="thinner") as edit:
            edit.remove_nodes(net.space("0").weakest(count=1))
    return counts


def test_sizes_become_variables_after_the_first_edit() -> None:
    assert compiled_sizes(6, dynamic=True) == [1, 2, 2, 2, 2, 2]


def test_without_the_block_every_size_is_compiled() -> None:
    assert compiled_sizes(4, dynamic=False) == [1, 2, 3, 4]


def test_the_settings_of_the_compiler_come_back() -> None:
    from torch._dynamo import config

    names = (
        "force_parameter_static_shapes",
        "force_nn_module_property_static_shapes",
        "recompile_limit",
    )
    before = [getattr(config, name) for name in names]
    with dynamic_sizes():
        assert not config.force_parameter_static_shapes
        assert config.recompile_limit == 64
    assert before == [getattr(config, name) for name in names]
    with config.patch(recompile_limit=100), dynamic_sizes():
        assert config.recompile_limit == 100


def opened_model() -> tuple[nn.Module, Tensor, Adopted]:
    """Returns a small model of which relations of every matrix and kernel are cut."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 16, 40),
        nn.ReLU(),
        nn.Linear(40, 24),
    )
    x = torch.randn(4, 3, 4, 4)
    net = gn.adopt(model, x)
    cut(net, "0", "2", "6", share=0.5)
    cut(net, "4", share=0.97)  # runs by the sparse kernels
    return model, x, net


def cut(net: Adopted, *names: str, share: float) -> None:
    with net.edit(reason="cut", allow_dead=True) as edit:
        for name in names:
            edit.cut(net.relations(name).smallest(fraction=share))


def require_same_step(compiled: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """Asserts that a compiled model computes the outputs and gradients of the model itself."""
    outputs = []
    gradients = []
    for forward in (compiled, model):
        model.zero_grad()
        outputs.append(forward(x))
        outputs[-1].square().sum().backward()
        found = []
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
        gradients.append(found)
    assert torch.allclose(*outputs, atol=1e-5)
    for mine, plain in zip(*gradients, strict=True):
        assert torch.allclose(mine, plain, atol=1e-4, rtol=1e-4)


def test_a_model_with_opened_weights_is_one_graph_over_edits() -> None:
    model, x, net = opened_model()
    counting = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    counts = []
    with dynamic_sizes():
        for _ in range(5):
            for name in ("0", "2", "4", "6"):
                require_same_step(compiled, model, x)
                counts.append(counting.frame_count)
                cut(net, name, share=0.05)
        assert counts == [1] * 20
        # The first change of the number of nodes is one of biases, too.
        for _ in range(3):
            with net.edit(reason="thinner", allow_dead=True) as edit:
                edit.remove_nodes(net.space("4").weakest(count=1))
            require_same_step(compiled, model, x)
            counts.append(counting.frame_count)
    assert counts[-3:] == [2, 2, 2]


def test_the_first_cut_of_a_weight_compiles_again() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 6))
    x = torch.randn(4, 6)
    net = gn.adopt(model, x)
    counting = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    counts = []
    with dynamic_sizes():
        for names in ((), ("0", "2"), ("0",), ("2",), ("0", "2")):
            cut(net, *names, share=0.1)
            require_same_step(compiled, model, x)
            counts.append(counting.frame_count)
    assert counts == [1, 2, 2, 2, 2]


def test_a_backward_after_a_cut_raises() -> None:
    model, x, net = opened_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(x).sum()
    cut(net, "0", share=0.1)
    with pytest.raises(gn.errors.StaleTopologyError):
        loss.backward()
