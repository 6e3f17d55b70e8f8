"""What follows the edits of a net: optimizers, averaged copies, tensors and processes."""

from grapnet.core._commit import Follower as Follower
from grapnet.core._index_map import IndexMap as IndexMap

from ._distributed import Distributed as Distributed
from ._tensors import Followed as Followed
