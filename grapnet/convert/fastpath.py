"""torch's fused Transformer encoder, which reads the weights of its Linears instead of calling
them.
"""

from torch import nn

from grapnet.network import GrapNet

# what turns the fused kernel off, and to what
_SWITCHES: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_KEPT = "_before_graft"


def set_fast_paths(model: nn.Module) -> None:
    """Turns the fused kernel off in encoders with a net inside, which then call it, and back on in
    the others.
    """
    for module in model.modules():
        for kind, (switch, off) in _SWITCHES.items():
            if isinstance(module, kind) and hasattr(module, switch):
                inside = any(isinstance(part, GrapNet) for part in module.modules())
                if inside:
                    vars(module).setdefault(_KEPT, getattr(module, switch))
                    setattr(module, switch, off)
                elif _KEPT in vars(module):
                    setattr(module, switch, vars(module)[_KEPT])
                    del vars(module)[_KEPT]
