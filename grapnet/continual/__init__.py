"""Learning from streams: tasks, memories, objectives, metrics and closed-form readouts."""

from ._gram import GramStatistics as GramStatistics
from ._gram import linear_discriminant as linear_discriminant
from ._gram import nearest_class_mean as nearest_class_mean
from ._losses import DER as DER
from ._losses import ERACE as ERACE
from ._losses import DERpp as DERpp
from ._losses import ExperienceReplay as ExperienceReplay
from ._losses import Objective as Objective
from ._losses import logit_adjusted_cross_entropy as logit_adjusted_cross_entropy
from ._losses import seen_class_cross_entropy as seen_class_cross_entropy
from ._memories import BalancedMemory as BalancedMemory
from ._memories import Batch as Batch
from ._memories import Memory as Memory
from ._memories import ReservoirMemory as ReservoirMemory
from ._metrics import AccuracyMatrix as AccuracyMatrix
from ._metrics import Drift as Drift
from ._metrics import Evaluation as Evaluation
from ._metrics import evaluate as evaluate
from ._metrics import structural_drift as structural_drift
from ._readout import ClosedFormReadout as ClosedFormReadout
from ._streams import Run as Run
from ._streams import Step as Step
from ._streams import Task as Task
from ._streams import TaskStream as TaskStream
from ._streams import train_on_stream as train_on_stream
