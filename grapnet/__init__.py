"""GrapNet: neural networks whose structure is data you can edit while they train."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from . import rules as rules
from .checkpoint import Archive as Archive
from .checkpoint import load as load
from .checkpoint import open as open
from .checkpoint import restore as restore
from .checkpoint import save as save
from .convert.graft import from_module as from_module
from .convert.graft import graft as graft
from .convert.ungraft import ungraft as ungraft
from .core.activation import register_activation as register_activation
from .core.edit import Edit as Edit
from .core.errors import CheckpointError as CheckpointError
from .core.errors import ConversionError as ConversionError
from .core.errors import EditError as EditError
from .core.errors import FrozenError as FrozenError
from .core.errors import GrapNetError as GrapNetError
from .core.errors import HistoryError as HistoryError
from .core.errors import InvariantError as InvariantError
from .core.errors import OptimizerError as OptimizerError
from .core.errors import PlanError as PlanError
from .core.errors import StaleNodeError as StaleNodeError
from .core.errors import StaleRelationsError as StaleRelationsError
from .core.errors import StaleTopologyError as StaleTopologyError
from .core.errors import TopologyError as TopologyError
from .core.invariants import check as check
from .core.joint import edit_together as edit_together
from .core.joint import redo_together as redo_together
from .core.joint import undo_together as undo_together
from .core.journal import Commit as Commit
from .core.journal import Diff as Diff
from .core.node import GrapNode as GrapNode
from .core.relation_set import RelationSet as RelationSet
from .core.remap import IndexMap as IndexMap
from .core.selection import NodeSet as NodeSet
from .execution.plans import register_backend as register_backend
from .execution.snapshot import SnapshotController as SnapshotController
from .export import snapshot as snapshot
from .learning.distributed import Distributed as Distributed
from .learning.optim import attach as attach
from .learning.optim import detach as detach
from .network import GrapNet as GrapNet
from .rules.manager import RuleManager as RuleManager

try:
    __version__ = _version("grapnet")
except _PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"
