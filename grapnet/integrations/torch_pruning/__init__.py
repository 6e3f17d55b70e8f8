"""Torch-Pruning's names over adopted models: its scripts, with undo and optimizers that follow.

`install()` makes `import torch_pruning` return this package, and
`python -m grapnet.integrations.torch_pruning script.py` runs a script with it. Written against
Torch-Pruning 1.6.1.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> import grapnet.integrations.torch_pruning as tp
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    >>> graph = tp.DependencyGraph().build_dependency(model, torch.randn(1, 3, 9, 9))
    >>> graph.get_pruning_group(model[0], tp.prune_conv_out_channels, idxs=[2, 6]).prune()
    >>> model[2].weight.shape
    torch.Size([4, 6, 3, 3])
    >>> commit = graph.net.undo()
    >>> model[2].weight.shape
    torch.Size([4, 8, 3, 3])
"""

import sys

from . import benchmark, dependency, function, importance, ops, pruner, serialization, utils
from .dependency import Dependency as Dependency
from .dependency import DependencyGraph as DependencyGraph
from .dependency import Group as Group
from .dependency import Node as Node
from .function import *  # noqa: F403
from .serialization import load as load
from .serialization import load_state_dict as load_state_dict
from .serialization import save as save
from .serialization import state_dict as state_dict

__version__ = "1.6.1"


def install() -> None:
    """Makes `import torch_pruning`, and imports from its modules, return this package."""
    modules = {
        "": sys.modules[__name__],
        ".dependency": dependency,
        ".importance": importance,
        ".ops": ops,
        ".pruner": pruner,
        ".pruner.function": function,
        ".pruner.importance": importance,
        ".pruner.algorithms": pruner,
        ".serialization": serialization,
        ".utils": utils,
        ".utils.benchmark": benchmark,
        ".utils.op_counter": utils,
    }
    for name, module in modules.items():
        sys.modules[f"torch_pruning{name}"] = module
