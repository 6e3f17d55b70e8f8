"""Pictures of nets and of their edits: every function draws into `ax`, or a figure of its own, and
returns the axes.

Nothing here touches pyplot, and matplotlib is imported when something is drawn.
"""

from .canvas import PICTURES as PICTURES
from .canvas import save as save
from .canvas import theme as theme
from .child_owned import deletion as deletion
from .colors import owner_colors as owner_colors
from .distributions import degrees as degrees
from .distributions import weights as weights
from .edits import timeline as timeline
from .layered import graph as graph
from .rectangle import adjacency as adjacency
from .stream import accuracy_matrix as accuracy_matrix
