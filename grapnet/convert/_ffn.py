"""gn.graft_ffn: the feed-forward blocks of Transformers as nets.

Blocks are known by the names of their classes, so that no other library is imported.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from grapnet._network import GrapNet
from grapnet.core._edit import edit as edit_nets
from grapnet.core._errors import ConversionError, EditError
from grapnet.core._journal import Commit
from grapnet.core._node import GrapNode
from grapnet.core._sets import NodeSet
from grapnet.core._undo import redo as redo_nets
from grapnet.core._undo import undo as undo_nets
from grapnet.execution._modules import activation_name, has_no_bias

from ._chain import Chain, Part, read_chain
from ._exchange import Optimizers
from ._graft import graft_chains
from ._origin import joined


@dataclass(frozen=True)
class Projections:
    """The names of the parts of a feed-forward block in the modules of one class.

    A block with an `activation` computes `out(activation(into(x)))`, with optional dropout, and
    becomes one net. Without one, each projection becomes a net, called by the existing forward; it
    must treat every hidden unit separately, and call the projections instead of reading their
    weights.

    Attributes:
        into: the projections that compute the hidden units: one, or gate and up.
        out: the projection that reads them.
        activation: the module or function between the two.
        dropout: the Dropout behind the activation.
        output_dropout: the Dropout behind `out`.
        place: the module that the one net replaces; "" for the block itself.
        packed: whether `into` computes gate and up in one matrix, one behind the other.
    """

    into: tuple[str, ...]
    out: str
    activation: str | None = None
    dropout: str | None = None
    output_dropout: str | None = None
    place: str = ""
    packed: bool = False


_TORCH = Projections(
    ("linear1",), "linear2", activation="activation", dropout="dropout", place="linear1"
)
_VIT = Projections(("fc1",), "fc2", activation="activation_fn")
_NEOX = Projections(("dense_h_to_4h",), "dense_4h_to_h", activation="act")
_BERT = Projections(
    ("intermediate.dense",),
    "output.dense",
    activation="intermediate.intermediate_act_fn",
    place="intermediate",
)
_LLAMA = Projections(("gate_proj", "up_proj"), "down_proj")
# Layers that drop or compute something else between their projections.
_BART = Projections(("fc1",), "fc2")

FAMILIES: dict[str, Projections] = {
    **dict.fromkeys(("TransformerEncoderLayer", "TransformerDecoderLayer"), _TORCH),
    "GPT2MLP": Projections(("c_fc",), "c_proj", activation="act", output_dropout="dropout"),
    "T5DenseActDense": Projections(("wi",), "wo", activation="act", dropout="dropout"),
    # of DistilBERT
    "FFN": Projections(("lin1",), "lin2", activation="activation", output_dropout="dropout"),
    **dict.fromkeys(("ViTMLP", "DeiTMLP", "Dinov2MLP", "CLIPMLP", "SiglipMLP", "PhiMLP"), _VIT),
    **dict.fromkeys(("GPTNeoXMLP", "FalconMLP"), _NEOX),
    **dict.fromkeys(("BertLayer", "RobertaLayer", "XLMRobertaLayer", "ElectraLayer"), _BERT),
    **dict.fromkeys(("DebertaLayer", "DebertaV2Layer"), _BERT),
    **dict.fromkeys(("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"), _LLAMA),
    **dict.fromkeys(("GemmaMLP", "Gemma2MLP", "Gemma3MLP"), _LLAMA),
    "Phi3MLP": Projections(("gate_up_proj",), "down_proj", packed=True),
    "ModernBertMLP": Projections(("Wi",), "Wo", packed=True),
    **dict.fromkeys(("OPTDecoderLayer", "BartEncoderLayer", "BartDecoderLayer"), _BART),
    **dict.fromkeys(("WhisperEncoderLayer", "WhisperDecoderLayer"), _BART),
    "AlbertLayer": Projections(("ffn",), "ffn_output"),
    "XLNetFeedForward": Projections(("layer_1",), "layer_2"),
    "EsmLayer": Projections(("intermediate.dense",), "output.dense"),
}
# Hugging Face's own classes beside nn.Linear, and whether their weight is [in, out].
_LINEARS = {"Conv1D": True, "FalconLinear": False}
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "SiLUActivation": "silu",
    "MishActivation": "mish",
    "LinearActivation": "identity",
}
_FUNCTIONS: dict[Callable[..., Tensor], str] = {
    functional.relu: "relu",
    functional.gelu: "gelu",
    functional.silu: "silu",
    torch.relu: "relu",
    torch.tanh: "tanh",
    torch.sigmoid: "sigmoid",
}


def graft_ffn(
    model: nn.Module,
    layers: int | slice | Iterable[int] | None = None,
    optimizer: Optimizers = None,
    *,
    drop_zeros: bool = False,
    projections: Mapping[str, Projections] | None = None,
) -> "list[FeedForward]":
    """Replaces the feed-forward blocks of a Transformer by equivalent nets, in place; returns
    handles.

    Supported blocks are the classes in `FAMILIES`, and an `nn.Sequential` of two Linears with an
    activation between them. Outputs, gradients and the next step of `optimizer` stay the same, to
    rounding; `gn.ungraft(model)` reverts it.

    Args:
        model: any model.
        layers: a number, several numbers or a slice of blocks, in the order of the model's modules;
            negative numbers count from the end. All that are not nets already by default.
        optimizer: one or several that continue with the nets' Parameters, as for `gn.graft`.
        drop_zeros: omit weights that are zero.
        projections: further blocks, by the names of their classes.

    Raises:
        ConversionError: there is no supported block, or one cannot become nets; nothing changes.
        IndexError: a block of `layers` does not exist.
        OptimizerError: as for `gn.graft`.

    Examples:
        >>> import grapnet as gn
        >>> encoder = nn.TransformerEncoder(
        ...     nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), num_layers=2
        ... )
        >>> optimizer = torch.optim.AdamW(encoder.parameters())
        >>> first, second = gn.graft_ffn(encoder, optimizer=optimizer)
        >>> first  # doctest: +ELLIPSIS
        FeedForward('layers.0', 32 hidden units, GrapNet(16-32-16, 1,024 relations, ...))
        >>> commits = first.remove_hidden([0, 1, 2], reason="try without")
        >>> len(first.hidden), encoder(torch.zeros(4, 7, 16)).shape
        (29, torch.Size([4, 7, 16]))
    """
    blocks = _blocks(model, projections)
    if not blocks:
        raise ConversionError(
            f"this {type(model).__name__} has no feed-forward block of a known class."
            f"{_near_misses(model)} Name the projections of other blocks by class:"
            ' gn.graft_ffn(model, projections={"MLP": grapnet.convert.Projections(("fc1",),'
            ' "fc2")})'
        )
    chosen = _chosen(blocks, layers)
    refusals = [block.refusal for block in chosen if block.refusal]
    if refusals:
        raise ConversionError("; ".join(refusals))
    chains: dict[str, Chain] = {}
    for block in chosen:
        chains.update(block.chains)
    graft_chains(model, chains, optimizer, drop_zeros=drop_zeros)
    return [_handle(model, block) for block in chosen]


def ffn_handles(
    model: nn.Module, *, projections: Mapping[str, Projections] | None = None
) -> "list[FeedForward]":
    """Returns the handles of the blocks that are nets, for example after `gn.restore` or in a copy.

    Args:
        model: any model.
        projections: as for `graft_ffn`.
    """
    blocks = _blocks(model, projections)
    return [_handle(model, block) for block in blocks if block.is_grafted]


@dataclass(frozen=True, eq=False)
class FeedForward:
    """A feed-forward block of a Transformer: one net with a hidden layer, or several that share
    their hidden units.

    Of several, the last one reads the units that the others compute: gate, up, down. Edit relations
    in the nets; add and remove units here, in all nets or in none.

    Attributes:
        name: the name of the block in the model.
        nets: its nets.
        packed: whether the first of two nets has two nodes for every unit, the gates first and then
            the values.
    """

    name: str
    nets: tuple[GrapNet, ...]
    packed: bool = False

    @property
    def net(self) -> GrapNet:
        """The net of a block that is one."""
        if len(self.nets) == 1:
            return self.nets[0]
        raise AttributeError(f"{self.name!r} is {len(self.nets)} nets: handle.nets")

    @property
    def hidden(self) -> NodeSet:
        """The hidden units, as the live layer of nodes that the last net reads them from."""
        return self.nets[-1].layers[-2]

    @torch.no_grad()
    def importance(self) -> Tensor:
        """Returns the product of the norms of every hidden unit's incoming and outgoing weights.

        Gates count, biases do not. A unit without relations on one side has importance 0. The
        result has no gradient.

        Returns:
            One number per unit, [n_hidden], in the order of `handle.hidden`.
        """
        norms = []  # each [copies, n_hidden]
        for net, (layer, copies) in zip(self.nets, self._layers(), strict=True):
            shape = (copies, len(self.hidden))
            for t in net.entering(layer.index):
                before = net.transitions[t]
                norms.append(_norms(before.values(), before.child, shape))
            for t in net.leaving(layer.index):
                after = net.transitions[t]
                norms.append(_norms(after.values(), after.topology.parents(), shape))
        return torch.cat(norms).prod(0)

    def remove_hidden(
        self,
        units: Any,
        *,
        reason: str = "remove hidden units",
        by: str | None = None,
        allow_dead: bool = False,
    ) -> tuple[Commit, ...]:
        """Removes hidden units from all nets in one transaction; an error leaves every net
        unchanged.

        Args:
            units: rows from 0 to `len(handle.hidden) - 1`, one bool per unit, or nodes of one of
                the nets, such as `handle.hidden[:3]`.
            reason: why, for the journal of every net.
            by: which rule or person edits.
            allow_dead: as for `net.edit`; True to remove all of them.

        Returns:
            The commit of every net; empty if there was nothing to remove.

        Raises:
            IndexError: there are no such units.
            EditError: the nodes are not hidden units, they are all units of a Conv1D, which needs
                one, or the nets no longer share their units.
        """
        rows = self._rows(units)
        count = len(self.hidden)
        if 0 < len(rows) == count and any(map(_is_transposed_net, self.nets)):
            raise EditError(
                f"these are all hidden units of {self.name!r}, and the Conv1Ds that gn.ungraft puts"
                " back need one; keep one"
            )
        together = edit_nets(*self.nets, reason=reason, by=by, allow_dead=allow_dead)
        with together as edits:
            for edit, (layer, copies) in zip(edits, self._layers(), strict=True):
                nodes = layer[torch.cat([rows + number * count for number in range(copies)])]
                edit.remove_nodes(nodes, interface=True)
        return tuple(edit.receipt for edit in edits if edit.receipt is not None)

    def add_hidden(
        self,
        count: int,
        *,
        incoming: str = "linear",
        outgoing: str = "zero",
        owner: str | None = None,
        reason: str = "add hidden units",
        by: str | None = None,
    ) -> tuple[Commit, ...]:
        """Adds hidden units, connected to every input and output, in all nets in one transaction.

        Args:
            count: how many.
            incoming: how their incoming weights are drawn; see `edit.connect`.
            outgoing: the same for the outgoing ones; "zero" preserves the function.
            owner: a tag to select them by.
            reason: why, for the journal of every net.
            by: which rule or person edits.

        Raises:
            EditError: the block has gate and up in one matrix.
        """
        if self.packed:
            raise EditError(
                f"{self.name!r} has gate and up in one matrix, so units cannot be added at its end"
            )
        with edit_nets(*self.nets, reason=reason, by=by) as edits:
            for edit, net, (layer, _) in zip(edits, self.nets, self._layers(), strict=True):
                number = layer.index
                bias = "linear"
                # Where no node is left, a Linear without bias stays one.
                if not layer.is_sensory and (len(layer) == 0 or has_no_bias(layer)):
                    bias = None
                units = edit.add_nodes(number, count, owner=owner, bias=bias)
                for t in net.entering(number):
                    parents = net.layers[net.transitions[t].source]
                    edit.connect(parents, units, weights=incoming)
                for t in net.leaving(number):
                    children = net.layers[net.transitions[t].target]
                    edit.connect(units, children, weights=outgoing)
        return tuple(edit.receipt for edit in edits if edit.receipt is not None)

    def undo(self) -> tuple[Commit, ...]:
        """Reverts the last transaction over the block, in all nets or in none; see
        `gn.undo`.
        """
        return undo_nets(*self.nets)

    def redo(self) -> tuple[Commit, ...]:
        """Reverts the last undo; see `gn.redo`."""
        return redo_nets(*self.nets)

    def __repr__(self) -> str:
        nets = ", ".join(map(repr, self.nets))
        return f"FeedForward({self.name!r}, {len(self.hidden)} hidden units, {nets})"

    def _layers(self) -> list[tuple[Any, int]]:
        """Returns the layer of every net that holds the hidden units, and how many nodes each unit
        has there.
        """
        if len(self.nets) == 1:
            return [(self.net.layers[1], 1)]
        layers = [(net.layers[-1], 1) for net in self.nets[:-1]]
        if self.packed:
            layers = [(layer, 2) for layer, _ in layers]
        layers.append((self.hidden, 1))
        counts = [len(layer) / copies for layer, copies in layers]
        if len(set(counts)) > 1:
            raise EditError(
                f"the nets of {self.name!r} share their hidden units, and have"
                f" {', '.join(f'{count:g}' for count in counts)} of them: one was edited alone."
                " Revert that: net.undo(alone=True)"
            )
        return layers

    def _rows(self, units: Any) -> Tensor:
        """Returns the rows of hidden units, in order."""
        if not isinstance(units, NodeSet | GrapNode):
            units = self.hidden[units]
        if isinstance(units, GrapNode):
            units = units.as_set()
        for layer, _ in self._layers():
            if units.graph is layer.graph and set(units._uids_by_layer) <= {layer.index}:
                rows = units._rows_by_layer().get(layer.index, torch.empty(0, device="cpu"))
                return (rows.long() % max(len(self.hidden), 1)).unique()
        raise EditError(f"these nodes are not hidden units of {self.name!r}")


def _norms(weights: Tensor, rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Returns the norm of the weights of each row, in single precision or better, in this shape."""
    squares = weights.to(torch.promote_types(weights.dtype, torch.float32)).square()
    return squares.new_zeros(math.prod(shape)).index_add(0, rows, squares).sqrt().view(shape)


def _is_transposed_net(net: GrapNet) -> bool:
    return net._origin is not None and any(part.transposed for part in net._origin.chain.parts)


@dataclass(frozen=True, eq=False)
class _Block:
    """One feed-forward block of a model.

    Attributes:
        name: in the model.
        places: the names of its nets.
        chains: what becomes these nets, by the names of the anchors; empty when they are nets.
        refusal: why it cannot become nets.
        packed: see `Projections`.
    """

    name: str
    places: tuple[str, ...] = ()
    chains: dict[str, Chain] = field(default_factory=dict)
    refusal: str = ""
    packed: bool = False

    @property
    def is_grafted(self) -> bool:
        return not self.chains and not self.refusal


def _blocks(model: nn.Module, projections: Mapping[str, Projections] | None) -> list[_Block]:
    """Returns the feed-forward blocks in the order of the modules, with those that are nets."""
    found = [_read(name, module, projections or {}) for name, module in model.named_modules()]
    return [block for block in found if block is not None]


def _read(name: str, module: nn.Module, projections: Mapping[str, Projections]) -> _Block | None:
    """Returns the block that a module is, None for any other module."""
    if isinstance(module, GrapNet):
        return _read_net(name, module)
    if type(module) is nn.Sequential:
        return _read_sequential(name, module)
    known = _known(module, projections)
    if known is None:
        return None
    if known.place and _read_net(known.place, module.get_submodule(known.place)) is not None:
        return None
    paths = (*known.into, known.out)
    linears = [module.get_submodule(path) for path in paths]
    places = tuple(joined(name, path) for path in paths)
    nets = [isinstance(linear, GrapNet) for linear in linears]
    if all(nets):
        return _Block(name, places, packed=known.packed)
    if any(nets):
        return _refused(name, module, "some of its projections are nets already; gn.ungraft them")
    for place, linear in zip(places, linears, strict=True):
        if _is_transposed(linear) is None:
            kind = type(linear).__name__
            return _refused(name, module, f"{place!r} ({kind}) is not a plain Linear")
    norm = _norm_over_units(module, linears)
    if norm is not None:
        reason = f"its {norm} normalizes over the hidden units, which then depend on each other"
        return _refused(name, module, reason)
    if known.activation is not None:
        function = operator.attrgetter(known.activation)(module)
        activation = _activation_of(function)
        if activation is not None:
            return _as_one_net(name, module, known, activation)
        if type(function).__module__ != "transformers.activations":
            return _refused(name, module, f"nodes have no activation that is {function!r}")
    chains = {}
    for place, linear in zip(places, linears, strict=True):
        chains[place] = Chain((Part("", bool(_is_transposed(linear))),))
    return _Block(name, places, chains, packed=known.packed)


def _known(module: nn.Module, projections: Mapping[str, Projections]) -> Projections | None:
    """Returns the projections of a module by its class, None for one that is not known."""
    for cls in type(module).__mro__:
        if cls.__name__ in projections:
            return projections[cls.__name__]
        if cls.__name__ in FAMILIES and _is_from_library(cls):
            known = FAMILIES[cls.__name__]
            return known if _computes_as(module, cls, known) else None
    return None


def _computes_as(module: nn.Module, cls: type, known: Projections) -> bool:
    """Returns whether a module has the methods of a known class, and parts of its library."""
    if "forward" in vars(module):
        return False
    methods = {name for name, method in vars(cls).items() if inspect.isfunction(method)}
    if any(getattr(type(module), name) is not vars(cls)[name] for name in methods - {"__init__"}):
        return False
    # of "intermediate.dense", the class of "intermediate"
    owners = [path.rpartition(".")[0] for path in (*known.into, known.out)]
    return all(_is_from_library(type(module.get_submodule(owner))) for owner in owners if owner)


def _is_from_library(cls: type) -> bool:
    return cls.__module__.startswith(("transformers.", "torch.nn.", "grapnet."))


def _read_net(name: str, net: nn.Module) -> _Block | None:
    """Returns the block that one net replaces, or None."""
    if not isinstance(net, GrapNet) or net._origin is None:
        return None
    chain = net._origin.chain
    if len(chain.parts) != 2 or net.sizes[0] != net.sizes[-1]:
        return None
    return _Block(name.removesuffix(chain.place).removesuffix("."), (name,))


def _read_sequential(name: str, module: nn.Sequential) -> _Block | None:
    """Returns the block that a Sequential is: two Linears with an activation between them."""
    try:
        chain = read_chain(module, name)
    except ConversionError:
        return None
    linears = [child for child in module if type(child) is nn.Linear]
    if len(chain.parts) != 2 or len(linears) != 2 or chain.parts[0].activation == "identity":
        return None
    if linears[0].in_features != linears[1].out_features:
        return None
    return _Block(name, (name,), {name: chain})


def _near_misses(model: nn.Module) -> str:
    """Returns why Sequentials of two Linears are no feed-forward blocks."""
    reasons = ""
    for name, module in model.named_modules():
        if type(module) is not nn.Sequential:
            continue
        if sum(type(child) is nn.Linear for child in module) == 2:
            try:
                read_chain(module, name)
            except ConversionError as error:
                reasons += f" {error}."
    return reasons


def _norm_over_units(module: nn.Module, linears: Sequence[nn.Module]) -> str | None:
    """Returns the name of a norm over the hidden units of a block, None when there is none.

    A norm as wide as the block's input may be one of that, so it is not taken for one.
    """
    out = linears[-1]
    width = getattr(out, "in_features", None)
    if width is None or width == getattr(out, "out_features", None):
        return None
    for name, child in module.named_children():
        sizes = getattr(child, "normalized_shape", getattr(child, "num_features", None))
        if sizes in (width, (width,)):
            return name
    return None


def _refused(name: str, module: nn.Module, reason: str) -> _Block:
    text = f"{name!r} ({type(module).__name__}) cannot become nets: {reason}"
    return _Block(name, refusal=text)


def _as_one_net(name: str, module: nn.Module, known: Projections, activation: str) -> _Block:
    """Returns the block of which one net computes everything."""
    parts = []
    for path, dropout in ((known.into[0], known.dropout), (known.out, known.output_dropout)):
        part = Part(path, bool(_is_transposed(module.get_submodule(path))), dropout_path=dropout)
        if dropout is not None:
            dropping = module.get_submodule(dropout)
            if type(dropping) is not nn.Dropout:
                return _refused(name, module, f"its {dropout} is a {type(dropping).__name__}")
            part = replace(part, dropout=float(dropping.p))
        parts.append(part)
    parts[0] = replace(parts[0], activation=activation, activation_path=known.activation)
    emptied: list[str] = []
    if known.place:
        paths = (known.activation, known.dropout, known.out, known.output_dropout)
        emptied = [path for path in paths if path and not path.startswith(f"{known.place}.")]
    chain = Chain(tuple(parts), place=known.place, emptied=tuple(emptied))
    return _Block(name, (joined(name, known.place),), {name: chain})


def _activation_of(function: Any) -> str | None:
    """Returns the activation of nodes that a module or function computes, None if there is none."""
    if not isinstance(function, nn.Module):
        return _FUNCTIONS.get(function)
    if type(function).__module__ == "transformers.activations":
        return _ACTIVATIONS.get(type(function).__name__)
    return activation_name(function)


def _is_transposed(linear: nn.Module) -> bool | None:
    """Returns whether the weight of a Linear is [in, out], None for anything but a plain Linear."""
    if "forward" in vars(linear):
        return None
    if type(linear).forward is nn.Linear.forward:
        return False
    if type(linear).__module__.startswith("transformers."):
        return _LINEARS.get(type(linear).__name__)
    return None


def _chosen(blocks: Sequence[_Block], layers: Any) -> list[_Block]:
    """Returns the blocks that `layers` names, in order."""
    if layers is None:
        left = [block for block in blocks if not block.is_grafted]
        if not left:
            raise ConversionError(
                "all feed-forward blocks of this model are nets already: ffn_handles(model)"
            )
        return left
    everything = range(len(blocks))
    try:
        numbers = [everything[operator.index(layers)]]
    except TypeError:
        if isinstance(layers, slice):
            layers = everything[layers]
        numbers = [everything[number] for number in layers]
    if not numbers:
        raise ConversionError(f"layers={layers} chooses none of {len(blocks)} blocks")
    chosen = [blocks[number] for number in sorted(set(numbers))]
    for block in chosen:
        if block.is_grafted:
            raise ConversionError(f"{block.name!r} is nets already: ffn_handles(model)")
    return chosen


def _handle(model: nn.Module, block: _Block) -> FeedForward:
    nets = []
    for place in block.places:
        net = model.get_submodule(place)
        assert isinstance(net, GrapNet)
        nets.append(net)
    return FeedForward(block.name, tuple(nets), block.packed)
