"""Pictures of nets and of their edits.

Every function draws into `ax`, or into a new figure, and returns the axes. None of them
uses pyplot, and matplotlib is imported when something is drawn.
"""

from ._canvas import PICTURES as PICTURES
from ._canvas import owner_colors as owner_colors
from ._canvas import save as save
from ._canvas import theme as theme
from ._charts import accuracy_matrix as accuracy_matrix
from ._charts import adjacency as adjacency
from ._charts import degrees as degrees
from ._charts import timeline as timeline
from ._charts import weights as weights
from ._deletion import deletion as deletion
from ._graph import graph as graph
from ._spaces import spaces as spaces
