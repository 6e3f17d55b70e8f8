"""Checkpoints: one file that holds graphs, their journals and whatever trains them, and no code."""

from .archive import Archive as Archive
from .archive import Saved as Saved
from .archive import load as load
from .archive import open as open
from .archive import restore as restore
from .archive import save as save
