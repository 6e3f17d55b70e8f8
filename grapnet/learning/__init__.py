"""What trains a graph, or any model: optimizers that follow, losses, replay, streams, metrics and
closed forms.
"""

from .losses import DER as DER
from .losses import ERACE as ERACE
from .losses import DERpp as DERpp
from .losses import ExperienceReplay as ExperienceReplay
from .losses import Objective as Objective
from .losses import logit_adjusted_cross_entropy as logit_adjusted_cross_entropy
from .losses import seen_class_cross_entropy as seen_class_cross_entropy
from .metrics import AccuracyMatrix as AccuracyMatrix
from .metrics import Drift as Drift
from .metrics import Evaluation as Evaluation
from .metrics import evaluate as evaluate
from .metrics import structural_drift as structural_drift
from .readout import ClosedFormReadout as ClosedFormReadout
from .readout import GramStatistics as GramStatistics
from .readout import linear_discriminant as linear_discriminant
from .readout import nearest_class_mean as nearest_class_mean
from .replay import BalancedMemory as BalancedMemory
from .replay import Batch as Batch
from .replay import Memory as Memory
from .replay import ReservoirMemory as ReservoirMemory
from .stream import Run as Run
from .stream import Step as Step
from .stream import Task as Task
from .stream import TaskStream as TaskStream
from .stream import train_on_stream as train_on_stream
