"""The errors GrapNet raises; each is also the built-in error a caller would expect."""


class GrapNetError(Exception):
    """Any error that GrapNet raises on purpose."""


class EditError(GrapNetError, ValueError):
    """An edit is impossible; nothing was changed."""


class FrozenError(EditError):
    """A value was assigned to a frozen coordinate; nothing was changed."""


class StaleError(GrapNetError):
    """An object belongs to an older version of the graph."""


class StaleNodeError(StaleError, LookupError):
    """A node handle or node set refers to a node that is not in the graph."""


class StaleRelationsError(StaleError, LookupError):
    """A relation set was selected before an edit moved its relations."""


class StaleTopologyError(StaleError, RuntimeError):
    """A backward pass ran through a forward pass of an older version, or a distributed model was
    not synchronized.
    """


class TopologyError(GrapNetError, ValueError):
    """A state dict belongs to a graph that is wired differently, and was not loaded; or graphs
    differ between ranks.
    """


class HistoryError(GrapNetError, RuntimeError):
    """The journal cannot undo, redo, compare or replay these versions."""


class InvariantError(GrapNetError, AssertionError):
    """A graph violates an invariant; the message names the first one."""


class PlanError(GrapNetError, RuntimeError):
    """No execution backend can run a transition."""


class OptimizerError(GrapNetError, RuntimeError):
    """An optimizer cannot follow an edit, or has not followed one."""


class CaptureError(GrapNetError, RuntimeError):
    """A training step cannot be recorded as a CUDA graph; it was not made."""


class CheckpointError(GrapNetError, ValueError):
    """A checkpoint file is damaged or does not fit; nothing was changed."""


class ConversionError(GrapNetError, ValueError):
    """A module cannot become a net, or a net cannot become that module again; nothing was
    changed.
    """
