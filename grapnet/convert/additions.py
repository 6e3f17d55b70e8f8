"""What somebody added to a net: no file holds it, and a net that takes its place would be without
it.
"""

from torch import nn

from grapnet.core._coordinates import Coordinates
from grapnet.network import GrapNet

_PARTS = {"layers", "transitions", "columns"}
_BUFFERS = {"frozen_values", "frozen_at", "_order", "ptr", "child"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def describe_additions(net: GrapNet, where: str) -> str:
    """Says which forward, modules, Parameters or buffers of its own a net has, and what to do;
    empty for a plain one.

    Args:
        net: the net.
        where: what to call it.
    """
    if type(net).forward is not GrapNet.forward or "forward" in vars(net):
        kind = type(net).__name__
        return (
            f"{where} ({kind}) has a forward of its own, which would be lost; do that in a module"
            " that holds the net"
        )
    added = [
        f"{name}.{key}".lstrip(".")
        for name, part in net.named_modules()
        for key in sorted(_added(part))
    ]
    if added:
        return (
            f"{where} has {added[0]} beside its graph, which would be lost; keep it in a module"
            " that holds the net"
        )
    return ""


def describe_hooks(net: GrapNet, where: str) -> str:
    """Says which modules and Parameters of a net have hooks, and what to do; those of recorders do
    not count.
    """
    found = [
        (name, hook)
        for name, part in net.named_modules()
        for kind in _HOOKS
        for hook in vars(part)[kind].values()
    ]
    for name, parameter in net.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        found += [(name, hook) for registered in hooks for hook in (registered or {}).values()]
    hooked = sorted({name or "itself" for name, hook in found if not _is_ours(hook)})
    if not hooked:
        return ""
    return (
        f"{where} has hooks ({', '.join(hooked)}), which would be lost; remove them, and register"
        " them afterwards"
    )


def _added(part: nn.Module) -> set[str]:
    """Returns the names of what a net, or a module inside it, holds beside what belongs there."""
    held = {*part._parameters, *part._buffers}
    if isinstance(part, Coordinates):
        return (held | part._modules.keys()) - _BUFFERS - {part._vector_name}
    return held | (part._modules.keys() - _PARTS if isinstance(part, GrapNet) else set())


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("grapnet.")
