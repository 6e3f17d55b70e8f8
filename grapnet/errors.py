"""The errors of GrapNet; each is also the built-in error that a caller expects."""

from .core._errors import CaptureError as CaptureError
from .core._errors import CheckpointError as CheckpointError
from .core._errors import ConversionError as ConversionError
from .core._errors import EditError as EditError
from .core._errors import FrozenError as FrozenError
from .core._errors import GrapNetError as GrapNetError
from .core._errors import HistoryError as HistoryError
from .core._errors import InvariantError as InvariantError
from .core._errors import OptimizerError as OptimizerError
from .core._errors import PlanError as PlanError
from .core._errors import StaleError as StaleError
from .core._errors import StaleNodeError as StaleNodeError
from .core._errors import StaleRelationsError as StaleRelationsError
from .core._errors import StaleTopologyError as StaleTopologyError
from .core._errors import TopologyError as TopologyError
