"""What follows the edits of a net: optimizers, averaged copies, tensors and processes."""

from grapnet.core._change import IndexMap as IndexMap
from grapnet.core._commit import Follower as Follower

from ._distributed import Distributed as Distributed
from ._tensors import Followed as Followed
