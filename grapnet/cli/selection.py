"""Which nodes and relations an edit is about: one set of options for all commands that edit."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

import grapnet as gn

from .childless import unheard_nodes
from .columns import counted
from .command import CommandError
from .suggestion import closest

_DIGITS = 18  # of a uid, which is an int64

Side = Literal["outgoing", "incoming", "both"]


def add_node_options(parser: argparse.ArgumentParser, *, childless: bool = False) -> None:
    """Adds what chooses nodes; `childless` adds what narrows them to hidden ones that nobody
    hears.
    """
    group = parser.add_argument_group(
        "which nodes", "several of one option add up; different options narrow each other"
    )
    group.add_argument(
        "--owner", action="append", metavar="NAME", help="those of an owner (repeatable)"
    )
    group.add_argument(
        "--layer",
        action="append",
        type=int,
        metavar="N",
        help="those of a layer, 0 is the sensory one",
    )
    group.add_argument(
        "--node", action="append", type=_uid, metavar="UID", help="this one (repeatable)"
    )
    group.add_argument("--all", action="store_true", help="all there are")
    if childless:
        told = "hidden ones without children, or whose children all go too; they change no output"
        group.add_argument("--childless", action="store_true", help=told)


def add_relation_options(parser: argparse.ArgumentParser, about_side: str) -> None:
    """Adds what chooses among the relations of nodes; `about_side` says which of them are taken by
    default.
    """
    group = parser.add_argument_group("which of their relations", about_side)
    side = group.add_mutually_exclusive_group()
    side.add_argument(
        "--outgoing",
        dest="side",
        action="store_const",
        const="outgoing",
        help="those the nodes own",
    )
    side.add_argument(
        "--incoming",
        dest="side",
        action="store_const",
        const="incoming",
        help="those that lead to them",
    )
    side.add_argument("--both", dest="side", action="store_const", const="both", help="both")
    group.add_argument(
        "--transition",
        action="append",
        type=int,
        metavar="T",
        help="those from layer T to the next (repeatable)",
    )
    group.add_argument(
        "--relation", action="append", metavar="PARENT:CHILD", help="this one, by uids (repeatable)"
    )
    group.add_argument(
        "--smallest",
        type=float,
        metavar="FRACTION",
        help="of all that the others leave, the share of smallest |weight|",
    )


@dataclass(frozen=True)
class Selection:
    """Nodes and relations as the options name them; each attribute is empty or None where nothing
    was said.

    Attributes:
        owners: tags.
        layers: numbers.
        nodes: uids.
        everything: whether all nodes were asked for.
        childless: whether only hidden nodes that nobody hears are meant.
        side: which relations of the nodes.
        transitions: numbers.
        relations: texts `PARENT:CHILD`.
        smallest: a share.
    """

    owners: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    everything: bool = False
    childless: bool = False
    side: Side | None = None
    transitions: tuple[int, ...] = ()
    relations: tuple[str, ...] = ()
    smallest: float | None = None

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Selection":
        """Returns what the options of a command say, those that it has."""
        named = {"owners": "owner", "layers": "layer", "nodes": "node", "transitions": "transition"}
        lists = {name: tuple(getattr(given, option, None) or ()) for name, option in named.items()}
        return cls(
            **lists,
            everything=getattr(given, "all", False),
            childless=getattr(given, "childless", False),
            side=getattr(given, "side", None),
            relations=tuple(getattr(given, "relation", None) or ()),
            smallest=getattr(given, "smallest", None),
        )

    @property
    def names_nodes(self) -> bool:
        """True when nodes were chosen."""
        return bool(self.owners or self.layers or self.nodes or self.everything or self.childless)

    @property
    def names_relations(self) -> bool:
        """True when relations were chosen by something other than their nodes."""
        return bool(self.transitions or self.relations) or self.smallest is not None

    def require_some(self) -> None:
        """Raises CommandError when nothing was chosen at all."""
        if not (self.names_nodes or self.names_relations):
            raise CommandError("nothing says what to edit", f"say {self._choices()}")

    def require_nodes(self) -> None:
        """Raises CommandError when no nodes were chosen."""
        if not self.names_nodes:
            raise CommandError("nothing says which nodes", f"say {self._choices()}")

    def chosen_nodes(self, net: gn.GrapNet) -> gn.NodeSet:
        """Returns the nodes; raises CommandError for a name that the net does not have."""
        for owner in self.owners:
            require_owner(owner, net.owners)
        _require_numbers("layer", self.layers, len(net.layers))
        for uid in self.nodes:
            _require_node(net, uid)
        nodes = net.select(layer=self.layers or None)
        if self.owners:
            tagged = net.select(owner=self.owners[0])
            for owner in self.owners[1:]:
                tagged |= net.select(owner=owner)
            nodes &= tagged
        if self.nodes:
            wanted = torch.tensor(self.nodes, device="cpu")
            nodes = nodes[torch.isin(nodes.uids, wanted)]
        return nodes[torch.isin(nodes.uids, unheard_nodes(net))] if self.childless else nodes

    def chosen_relations(self, net: gn.GrapNet, default: Side) -> gn.RelationSet:
        """Returns the relations; raises CommandError for a name that the net does not have.

        Args:
            net: where to look.
            default: which relations of the nodes are meant when the options do not say so.
        """
        nodes, side = self.chosen_nodes(net), self.side or default
        if not self.names_nodes or side == "both":
            found = nodes.outgoing() | nodes.incoming()
        else:
            found = nodes.outgoing() if side == "outgoing" else nodes.incoming()
        _require_numbers("transition", self.transitions, len(net.transitions))
        if self.transitions:
            count = len(net.transitions)
            found &= net.select(layer=[t % count for t in self.transitions]).outgoing()
        if self.relations:
            named = _pair(net, self.relations[0])
            for text in self.relations[1:]:
                named |= _pair(net, text)
            found &= named
        if self.smallest is not None:
            require_share("smallest", self.smallest)
            require_rank(found)
            found = found.smallest(fraction=self.smallest)
        return found

    def __str__(self) -> str:
        parts = [f"--owner {owner}" for owner in self.owners]
        parts += [f"--layer {n}" for n in self.layers] + [f"--node {uid}" for uid in self.nodes]
        parts += ["--all"] * self.everything + ["--childless"] * self.childless
        parts += [f"--{self.side}"] if self.side else []
        parts += [f"--transition {t}" for t in self.transitions] + [
            f"--relation {pair}" for pair in self.relations
        ]
        parts += [] if self.smallest is None else [f"--smallest {self.smallest:g}"]
        return " ".join(parts)

    def _choices(self) -> str:
        return "--owner NAME, --layer N, --node UID or --all; --help lists what narrows them"


def require_owner(owner: str, known: Iterable[str]) -> None:
    """Raises CommandError, with the owner that may have been meant, when nobody has that name."""
    names = list(known)
    if owner not in names:
        meant = closest(owner, names)
        hint = f"did you mean {meant!r}? " if meant else ""
        raise CommandError(
            f"no node has the owner {owner!r}", f"{hint}owners are: {', '.join(names) or 'none'}"
        )


def require_share(option: str, share: float) -> None:
    """Raises CommandError, with what may have been meant, for a number that is no share."""
    if not 0 <= share <= 1:
        hint = (
            f"--{option} {share / 100:g} for {share:g} %"
            if 1 < share <= 100
            else "for example 0.3 for 30 %"
        )
        raise CommandError(f"--{option} is a share between 0 and 1, got {share:g}", hint)


def require_rank(relations: gn.RelationSet) -> None:
    """Raises CommandError when the weight of a relation is not a number, so that nobody can say
    what is smallest.
    """
    broken = relations[relations.weights.detach().isnan()]
    if len(broken):
        first = f"{int(broken.parents[0])}:{int(broken.children[0])}"
        raise CommandError(
            f"{counted(len(broken), 'weight')} of these relations cannot be ranked: NaN, at {first}"
            " first",
            "use a file of before the net broke, or cut by name: grapnet cut FILE --relation"
            f" {first}",
        )


def _uid(text: str) -> int:
    """Reads a uid on the command line."""
    if not _is_uid(text):
        raise argparse.ArgumentTypeError(
            f"{_short(text)!r} is no uid, a whole number that grapnet inspect tells"
        )
    return int(text)


def _is_uid(text: str) -> bool:
    return text.isdecimal() and len(text) <= _DIGITS


def _short(text: str) -> str:
    return text if len(text) <= 2 * _DIGITS else f"{text[: 2 * _DIGITS]}…"


def _require_node(net: gn.GrapNet, uid: int) -> None:
    if net.find(uid) is None:
        raise CommandError(
            f"there is no node {uid}", "grapnet inspect FILE tells the uids of every layer"
        )


def _pair(net: gn.GrapNet, text: str) -> gn.RelationSet:
    parent, _, child = text.partition(":")
    if not (_is_uid(parent) and _is_uid(child)):
        hint = "for example --relation 3:61; grapnet inspect FILE tells the uids of every layer"
        raise CommandError(f"--relation {_short(text)}: expected PARENT:CHILD, two uids", hint)
    for uid in (parent, child):
        _require_node(net, int(uid))
    found = net.node(int(parent)).outgoing(to=net.node(int(child)))
    if not len(found):
        raise CommandError(
            f"--relation {text}: node {parent} owns no relation to node {child}",
            "relations lead from one layer to the next: PARENT:CHILD",
        )
    return found


def _require_numbers(what: str, numbers: tuple[int, ...], count: int) -> None:
    for number in numbers:
        if not -count <= number < count:
            raise CommandError(f"there is no {what} {number}", f"{what}s are 0 to {count - 1}")
