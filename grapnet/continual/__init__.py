"""Learning from streams: tasks, memories, objectives, metrics and closed-form readouts."""

from .gram import GramStatistics as GramStatistics
from .gram import linear_discriminant as linear_discriminant
from .gram import nearest_class_mean as nearest_class_mean
from .losses import DER as DER
from .losses import ERACE as ERACE
from .losses import DERpp as DERpp
from .losses import ExperienceReplay as ExperienceReplay
from .losses import Objective as Objective
from .losses import logit_adjusted_cross_entropy as logit_adjusted_cross_entropy
from .losses import seen_class_cross_entropy as seen_class_cross_entropy
from .memories import BalancedMemory as BalancedMemory
from .memories import Batch as Batch
from .memories import Memory as Memory
from .memories import ReservoirMemory as ReservoirMemory
from .metrics import AccuracyMatrix as AccuracyMatrix
from .metrics import Drift as Drift
from .metrics import Evaluation as Evaluation
from .metrics import evaluate as evaluate
from .metrics import structural_drift as structural_drift
from .readout import ClosedFormReadout as ClosedFormReadout
from .streams import Run as Run
from .streams import Step as Step
from .streams import Task as Task
from .streams import TaskStream as TaskStream
from .streams import train_on_stream as train_on_stream
