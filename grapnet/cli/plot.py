"""`grapnet plot`: draws the net of a checkpoint into a picture."""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from grapnet.streams import printable

from .command import Command, CommandError, Outcome
from .files import add_file, add_output, require_free, writing
from .opened import open_net

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    import grapnet as gn

KINDS = {
    "graph": "its layers, owners, what is frozen",
    "adjacency": "parents × children of one transition",
    "timeline": "its edits against the number of relations",
    "degrees": "how many nodes have how many children",
    "weights": "how many relations have which weight",
    "deletion": "what a cut removes, beside a masked dense row",
}

_MISSING = re.compile(r"Glyph (\d+) .*missing from")  # what matplotlib warns of


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds what can be drawn, and where it goes."""
    add_file(parser)
    listed = "; ".join(f"{name}: {about}" for name, about in KINDS.items())
    parser.add_argument(
        "--kind", choices=KINDS, default="graph", help=f"what to draw (default: graph). {listed}"
    )
    parser.add_argument(
        "--transition", type=int, default=0, metavar="N", help="of adjacency (default: 0)"
    )
    parser.add_argument(
        "--since", type=int, metavar="VERSION", help="of graph: also what was cut since then"
    )
    parser.add_argument(
        "--theme", choices=("light", "dark"), default="light", help="ground (default: light)"
    )
    parser.add_argument("--net", metavar="PLACE", help="which net of a model that has several")
    add_output(
        parser, "a .png, .svg or .pdf (default: FILE with the kind in its name and .png, beside it)"
    )


def run(given: argparse.Namespace) -> Outcome:
    """Draws and writes one picture."""
    from grapnet import plot

    path: Path = given.output or given.file.parent / f"{given.file.stem}-{given.kind}.png"
    if path.suffix.lower() not in plot.PICTURES:
        raise CommandError(
            f"{path} is no picture that can be written",
            f"end its name in {', '.join(sorted(plot.PICTURES))}",
        )
    net = open_net(given.file, given.net).to(given.device)
    require_free(path, force=given.force)
    if not 0 <= given.transition < len(net.transitions):
        last = len(net.transitions) - 1
        raise CommandError(
            f"{given.file} has transitions 0 to {last}, got --transition {given.transition}"
        )
    try:
        with plot.theme(given.theme), _told_of_signs(), writing(path, force=given.force) as partial:
            plot.save(_drawings(net, given)[given.kind](), partial)
    except ValueError as error:
        raise CommandError(str(error)) from None
    count = net.count()
    data = {
        "path": str(path),
        "kind": given.kind,
        "nodes": count.nodes,
        "relations": count.relations,
    }
    return Outcome(f"wrote {path}", {**data, "version": net.version})


@contextmanager
def _told_of_signs() -> Iterator[None]:
    """Tells in one line which signs of names the font does not have, in place of matplotlib's
    warnings.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    missing: dict[str, None] = {}
    for each in caught:
        if found := _MISSING.match(str(each.message)):
            missing[chr(int(found[1]))] = None
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if missing:
        told = f"the font of the picture has no {''.join(missing)}; boxes stand for what it lacks"
        print(f"grapnet: {printable(told)}", file=sys.stderr)


def _drawings(net: "gn.GrapNet", given: argparse.Namespace) -> "Mapping[str, Callable[[], Axes]]":
    from grapnet import plot

    return {
        "graph": lambda: plot.graph(net, cut_since=given.since),
        "adjacency": lambda: plot.adjacency(net, given.transition),
        "timeline": lambda: plot.timeline(net),
        "degrees": lambda: plot.degrees(net),
        "weights": lambda: plot.weights(net),
        "deletion": lambda: plot.deletion(net),
    }


COMMANDS: tuple[Command, ...] = (
    Command(
        "plot",
        "draw a net, its edits or its weights into a picture",
        "Look at a net",
        configure,
        run,
        examples=(
            "plot net.safetensors",
            "plot net.safetensors --kind adjacency --transition 1 -o wiring.svg",
            "plot net.safetensors --kind timeline --theme dark -o edits.png",
            "plot model.safetensors --net 2 --kind weights -o weights.png",
        ),
    ),
)
