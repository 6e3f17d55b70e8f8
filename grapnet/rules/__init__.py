"""Rules: what changes the structure of nets while they train."""

from ._activations import ActivationRecorder, CovarianceRecorder
from ._best import GrowBest, search_scale
from ._budget import Budget, weakest_within
from ._correlations import TensorCorrelationRecorder
from ._criteria import (
    Assignment,
    Choice,
    Correlation,
    Criterion,
    Fisher,
    Magnitude,
    Random,
    Scored,
    Taylor,
    Wanda,
)
from ._elimination import Elimination
from ._families import SplitIntoFamilies
from ._freeze import FreezeOwner
from ._gradients import GradientRecorder, TensorGradientRecorder
from ._gram import GramRecorder
from ._grow import GrowForTask
from ._manager import RuleError, RuleManager
from ._node_criteria import (
    ColumnSubset,
    MeanActivation,
    NodeNorm,
    NodeTaylor,
    RandomNodes,
    Redundancy,
)
from ._nodes import PruneNodes
from ._obs import OBS, Alternating
from ._orphans import RemoveOrphans
from ._preview import Preview
from ._prune import GradualSchedule, PruneWeakest, gradual_pruning
from ._pruning import Pruning, Skipped, Stage
from ._refit import refit
from ._repair import Repaired, gram_recorders, repair
from ._rewire import Rewire, rigl, set_rewiring
from ._rule import (
    At,
    Every,
    EveryTask,
    Recorder,
    RecordingRule,
    Rule,
    RuleContext,
    Schedule,
    Scheduled,
)
from ._saliency import FisherRecorder, InputRecorder, SaliencyRecorder, TensorFisherRecorder
from ._scopes import Quota, lamp_scores
from ._sift import CovarianceSifter
from ._srigl import SRigL, srigl
from ._steepest import SpaceGradientRecorder
from ._tiny import BottleneckRecorder, OptimalNodes
from ._untrained import SNIP, GraSP, SynFlow
from ._widen import GrowWidth

# The reference shows them in this order.
__all__ = [  # noqa: RUF022
    "RuleManager",
    "Preview",
    "Budget",
    "weakest_within",
    "RuleContext",
    "Every",
    "At",
    "EveryTask",
    "Scheduled",
    "GrowForTask",
    "GrowWidth",
    "GrowBest",
    "search_scale",
    "FreezeOwner",
    "PruneWeakest",
    "PruneNodes",
    "gradual_pruning",
    "GradualSchedule",
    "lamp_scores",
    "Magnitude",
    "Wanda",
    "Taylor",
    "Fisher",
    "OBS",
    "Alternating",
    "Correlation",
    "Random",
    "NodeNorm",
    "MeanActivation",
    "NodeTaylor",
    "ColumnSubset",
    "Elimination",
    "Redundancy",
    "RandomNodes",
    "Pruning",
    "Stage",
    "Skipped",
    "Scored",
    "Choice",
    "Assignment",
    "Quota",
    "Criterion",
    "SNIP",
    "GraSP",
    "SynFlow",
    "CovarianceSifter",
    "RemoveOrphans",
    "Rewire",
    "rigl",
    "set_rewiring",
    "SRigL",
    "srigl",
    "SplitIntoFamilies",
    "repair",
    "refit",
    "gram_recorders",
    "Repaired",
    "ActivationRecorder",
    "CovarianceRecorder",
    "GradientRecorder",
    "TensorGradientRecorder",
    "TensorCorrelationRecorder",
    "SpaceGradientRecorder",
    "InputRecorder",
    "FisherRecorder",
    "TensorFisherRecorder",
    "SaliencyRecorder",
    "GramRecorder",
    "BottleneckRecorder",
    "OptimalNodes",
    "Rule",
    "RecordingRule",
    "Recorder",
    "Schedule",
    "RuleError",
]
