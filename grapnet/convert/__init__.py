"""Conversion: plain modules become nets, inside of any model and in the middle of training, and
modules again.
"""

from grapnet.execution._modules import activation_name as activation_name

from ._chain import Chain as Chain
from ._chain import Part as Part
from ._chain import read_chain as read_chain
from ._ffn import FeedForward as FeedForward
from ._ffn import Projections as Projections
from ._ffn import ffn_handles as ffn_handles
from ._ffn import graft_ffn as graft_ffn
from ._graft import from_module as from_module
from ._graft import graft as graft
from ._graft import graft_chains as graft_chains
from ._origin import Origin as Origin
from ._origin import describe_origin as describe_origin
from ._origin import place as place
from ._ungraft import ungraft as ungraft
