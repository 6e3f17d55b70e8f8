"""Rules: what changes the structure of a net, outside of its core."""

from .budget import Budget as Budget
from .budget import weakest_within as weakest_within
from .covariance import CovarianceSifter as CovarianceSifter
from .freeze import FreezeOwner as FreezeOwner
from .gradients import GradientRecorder as GradientRecorder
from .grow import GrowForTask as GrowForTask
from .manager import RuleManager as RuleManager
from .orphans import RemoveOrphans as RemoveOrphans
from .preview import Preview as Preview
from .prune import GradualSchedule as GradualSchedule
from .prune import PruneWeakest as PruneWeakest
from .prune import lamp_scores as lamp_scores
from .recorders import ActivationRecorder as ActivationRecorder
from .recorders import CovarianceRecorder as CovarianceRecorder
from .rewire import Rewire as Rewire
from .roster import RuleError as RuleError
from .rule import Moment as Moment
from .rule import Recorder as Recorder
from .rule import RecordingRule as RecordingRule
from .rule import Rule as Rule
from .schedule import At as At
from .schedule import Every as Every
from .schedule import EveryTask as EveryTask
from .schedule import Schedule as Schedule
from .structure import SplitIntoFamilies as SplitIntoFamilies
from .widen import GrowWidth as GrowWidth
