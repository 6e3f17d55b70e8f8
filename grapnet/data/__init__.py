"""Data sets for studies and examples: found on this machine, never fetched."""

from .fashion import find_fashion as find_fashion
from .fashion import load_fashion as load_fashion
