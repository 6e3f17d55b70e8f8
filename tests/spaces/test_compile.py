"""torch.compile around an adopted model whose sizes change."""

import torch
from torch import nn

import grapnet as gn
from grapnet.spaces import dynamic_sizes


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

    before = config.force_parameter_static_shapes, config.force_nn_module_property_static_shapes
    with dynamic_sizes():
        assert not config.force_parameter_static_shapes
    assert before == (
        config.force_parameter_static_shapes,
        config.force_nn_module_property_static_shapes,
    )
