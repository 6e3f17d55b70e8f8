"""Data sets for studies and examples: found on this machine, and downloaded only when asked to."""

from .cifar import CIFAR10 as CIFAR10
from .cifar import download_cifar10 as download_cifar10
from .cifar import find_cifar10 as find_cifar10
from .cifar import load_cifar10 as load_cifar10
from .download import Source as Source
from .errors import DataError as DataError
from .errors import DownloadError as DownloadError
from .errors import MissingDataError as MissingDataError
from .fashion import FASHION as FASHION
from .fashion import download_fashion as download_fashion
from .fashion import find_fashion as find_fashion
from .fashion import load_fashion as load_fashion
from .features import Features as Features
from .features import load_features as load_features
from .features import save_features as save_features
from .images import FASHION_MEAN as FASHION_MEAN
from .images import FASHION_SPREAD as FASHION_SPREAD
from .images import downsample as downsample
from .images import normalise as normalise
from .images import standardise as standardise
