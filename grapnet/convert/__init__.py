"""Conversion: plain modules become nets, inside of any model and in the middle of training, and
modules again.
"""

from grapnet.execution.modules import activation_name as activation_name

from .chain import Chain as Chain
from .chain import Part as Part
from .chain import read_chain as read_chain
from .graft import from_module as from_module
from .graft import graft as graft
from .graft import graft_chains as graft_chains
from .origin import Origin as Origin
from .origin import describe_origin as describe_origin
from .origin import place as place
from .ungraft import ungraft as ungraft
