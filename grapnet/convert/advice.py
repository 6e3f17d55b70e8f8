"""What to do with modules that cannot become nets: the second half of the errors that refuse
them.
"""

from itertools import pairwise
from keyword import iskeyword

from torch import nn

from grapnet.core.activation import is_activation
from grapnet.core.wording import with_article
from grapnet.execution.modules import activation_name

_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
# of torch's activations those that are no function of one number
_NO_FUNCTIONS = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.RReLU)
_GRAFT = "gn.graft(model, nn.Linear)"


def refusal(module: nn.Module, called: str, layer: int) -> str:
    """Returns why a module of a row is neither linear nor an activation of nodes, and what to do
    with it.

    Args:
        module: what is refused.
        called: its name in the message.
        layer: how many Linears stand before it.
    """
    kind, name = with_article(type(module).__name__), type(module).__name__.lower()
    name = f"own_{name}" if is_activation(name) else name
    if isinstance(module, _NORMS):
        return (
            f"{called} is {kind}, whose statistics and scales belong to single nodes and would have"
            f" to follow every commit; nets have none. Make nets of the Linears around it: {_GRAFT}"
        )
    if isinstance(module, nn.Linear):
        return (
            f"{called} is {kind}, no plain nn.Linear: its weight is computed or read in a way of"
            " its own"
        )
    if layer > 0 and _may_be_an_activation(module):
        return (
            f"{called} is {kind}, which no activation of a node stands for. If it is a function of"
            " one number, put "
            f'an nn.Identity in its place, gn.register_activation("{name}", function), and in an'
            " edit of the net "
            f'edit.set_activation(net.layers[{layer}], "{name}"); otherwise leave it outside of the'
            f" net: {_GRAFT}"
        )
    rows = (
        "a net of the modules after it"
        if layer == 0
        else "nets of the modules before it and after it"
    )
    return (
        f"{called} is {kind}, neither an nn.Linear nor an activation of nodes. Leave it outside:"
        f" make {rows}, or of every Linear around it: {_GRAFT}"
    )


def way_on(module: nn.Module, name: str) -> str:
    """Returns what to do with a module of some class, whose forward nobody can read; "" without a
    Linear inside.

    Args:
        module: an own class, say.
        name: of the module in its model, "" for the model itself.
    """
    linears = [path for path, child in module.named_modules() if type(child) is nn.Linear]
    if not linears:
        return ""
    if name:
        named = ", ".join(f'"{name}.{path}"' for path in linears[:4]) + (
            ", ..." if len(linears) > 4 else ""
        )
        return f". Make nets of the Linears in it: gn.graft(model, [{named}])"
    row = _row(module)
    say = (
        f"Say how it runs, such as gn.from_module(nn.Sequential({row})), or make" if row else "Make"
    )
    return f". {say} nets of the Linears in it: {_GRAFT}"


def _row(module: nn.Module) -> str:
    """Returns the children of a module as they may follow each other, "" when they are no stack of
    Linears.
    """
    children = dict(module.named_children())
    linears = [name for name, child in children.items() if type(child) is nn.Linear]
    others = {name: child for name, child in children.items() if name not in linears}
    chain = [module.get_submodule(name) for name in linears]
    # they run otherwise
    if len(linears) < 2 or any(a.out_features != b.in_features for a, b in pairwise(chain)):
        return ""
    if any(next(other.parameters(), None) is not None for other in others.values()):
        return ""
    activations = [
        name for name, child in others.items() if activation_name(child) not in (None, "identity")
    ]
    row = [_spelled(linears[0])]
    for n, linear in enumerate(linears[1:]):
        between = (
            _spelled(activations[min(n, len(activations) - 1)]) if activations else "nn.ReLU()"
        )
        row += [between, _spelled(linear)]
    return ", ".join(row)


def _spelled(child: str) -> str:
    return (
        f"model.{child}"
        if child.isidentifier() and not iskeyword(child)
        else f'model.get_submodule("{child}")'
    )


def _may_be_an_activation(module: nn.Module) -> bool:
    """Says whether a module may be a function of one number: one of torch's that is, or somebody's
    own.
    """
    if isinstance(module, _NO_FUNCTIONS) or module.state_dict():
        return False
    home = type(module).__module__
    return home == "torch.nn.modules.activation" or not home.startswith("torch.")
