"""`grapnet plot`: draws the net of a checkpoint into a picture."""

import argparse
from pathlib import Path

from ._command import (
    Command,
    CommandError,
    Outcome,
    add_file,
    add_output,
    add_place,
    open_file,
    place_of,
    require_free,
    writing,
)

KINDS = {
    "graph": "its layers, owners, what is frozen",
    "adjacency": "parents × children of one transition",
    "timeline": "its edits against the number of relations",
    "degrees": "how many nodes have how many children",
    "weights": "how many relations have which weight",
    "deletion": "what a cut removes, beside a masked dense row",
}


def _configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    listed = "; ".join(f"{name}: {about}" for name, about in KINDS.items())
    parser.add_argument(
        "--kind", choices=KINDS, default="graph", help=f"what to draw (default: graph). {listed}"
    )
    parser.add_argument(
        "--transition", type=int, default=0, metavar="N", help="for adjacency (default: 0)"
    )
    parser.add_argument(
        "--since",
        type=int,
        metavar="VERSION",
        help="for graph: also relations that were cut since this version",
    )
    parser.add_argument(
        "--theme", choices=("light", "dark"), default="light", help="background (default: light)"
    )
    add_place(parser)
    add_output(parser, "a .png, .svg or .pdf (default: a .png beside FILE, with the kind)")


def _run(given: argparse.Namespace) -> Outcome:
    from grapnet import plot

    path: Path = given.output or given.file.with_name(f"{given.file.stem}-{given.kind}.png")
    if path.suffix.lower() not in plot.PICTURES:
        raise CommandError(
            f"{path} is not the name of a picture", f"use one of {', '.join(sorted(plot.PICTURES))}"
        )
    file = open_file(given.file)
    net = file.nets[place_of(file, given.net)].to(given.device)
    require_free(path, force=given.force)
    if not 0 <= given.transition < len(net.transitions):
        raise CommandError(
            f"no transition {given.transition}", f"transitions are 0 to {len(net.transitions) - 1}"
        )
    options = {}
    if given.kind == "graph":
        options["cut_since"] = given.since
    if given.kind == "adjacency":
        options["transition"] = given.transition
    with plot.theme(given.theme), writing(path, force=given.force) as partial:
        plot.save(getattr(plot, given.kind)(net, **options), partial)
    data = {
        "path": str(path),
        "kind": given.kind,
        "nodes": net.count().nodes,
        "relations": net.count().relations,
        "version": net.version,
    }
    return Outcome(f"wrote {path}", data)


COMMANDS = (
    Command(
        "plot",
        "draws a net, its edits or its weights into a picture",
        "Look at a net",
        _configure,
        _run,
        (
            "plot net.safetensors",
            "plot net.safetensors --kind adjacency --transition 1 -o wiring.svg",
            "plot net.safetensors --kind timeline --theme dark -o edits.png",
            "plot model.safetensors --net 2 --kind weights -o weights.png",
        ),
    ),
)
