"""Checkpoints: one file with graphs, their journals and training state, and no code."""

from ._archive import Archive as Archive
from ._archive import Saved as Saved
from ._archive import load as load
from ._archive import open as open
from ._archive import restore as restore
from ._archive import save as save
