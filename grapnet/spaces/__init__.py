"""Spaces of whole models: gn.adopt, and rules for operators of one's own."""

from grapnet._torch import dynamic_sizes as dynamic_sizes

from ._adopted import Adopted as Adopted
from ._adopted import adopt as adopt
from ._adopted import adopted as adopted
from ._axes import Stuck as Stuck
from ._axes import pin as pin
from ._comparison import Difference as Difference
from ._comparison import differences as differences
from ._discovery import Example as Example
from ._gating import gate_gradients as gate_gradients
from ._space import Space as Space
from ._statistics import refresh_statistics as refresh_statistics
from ._transformer import Attention as Attention
from ._transformer import TransformerLayer as TransformerLayer
from ._transformer import transformer_layers as transformer_layers
from ._typing import register_rule as register_rule
