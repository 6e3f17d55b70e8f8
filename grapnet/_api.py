"""The public names of GrapNet, which `import grapnet` offers."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import errors as errors
from . import rules as rules
from ._export import snapshot as snapshot
from ._network import GrapNet as GrapNet
from .checkpoint import load as load
from .checkpoint import open as open
from .checkpoint import restore as restore
from .checkpoint import save as save
from .convert._ffn import graft_ffn as graft_ffn
from .convert._graft import from_module as from_module
from .convert._graft import graft as graft
from .convert._ungraft import ungraft as ungraft
from .core._check import check as check
from .core._edit import Edit as Edit
from .core._edit import edit as edit
from .core._journal import Commit as Commit
from .core._node import GrapNode as GrapNode
from .core._sets import NodeSet as NodeSet
from .core._sets import RelationSet as RelationSet
from .core._undo import redo as redo
from .core._undo import undo as undo
from .following._capture import capture as capture
from .following._optimizers import attach as attach
from .following._optimizers import detach as detach
from .following._tensors import follow as follow
from .rules._one_shot import prune as prune
from .spaces import adopt as adopt
from .spaces import adopted as adopted
from .spaces import refresh_statistics as refresh_statistics

if _TYPE_CHECKING:
    # Imported when it is first used: most programs never do.
    from . import continual as continual
