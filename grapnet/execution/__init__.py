"""How a net runs: what backends and policies implement, and the functions that register them."""

from grapnet.core._activation import register_activation as register_activation

from . import _opened as _opened
from ._manager import register_backend as register_backend
from ._plan import Backend as Backend
from ._plan import FeatureMajorPlan as FeatureMajorPlan
from ._plan import MovablePlan as MovablePlan
from ._plan import Plan as Plan
from ._plan import Policy as Policy
from ._tune import Tuned as Tuned
from ._tune import tune as tune
