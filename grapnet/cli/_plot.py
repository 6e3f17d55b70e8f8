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
    "spaces": "the spaces of a whole model: sizes, writers and readers",
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
        "--kind",
        choices=KINDS,
        help=f"what to draw (default: graph; spaces of a whole model). {listed}",
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

    if given.output is not None and given.output.suffix.lower() not in plot.PICTURES:
        raise CommandError(
            f"{given.output} is not the name of a picture",
            f"use one of {', '.join(sorted(plot.PICTURES))}",
        )
    file = open_file(given.file)
    usual = "spaces" if file.is_adopted else "graph"
    kind = given.kind or usual
    path: Path = given.output or given.file.with_name(f"{given.file.stem}-{kind}.png")
    if file.is_adopted or kind == "spaces":
        if not file.is_adopted or kind != "spaces":
            content = "a whole model" if file.is_adopted else "nets"
            raise CommandError(f"--kind {kind}: this file holds {content}", f"use --kind {usual}")
        require_free(path, force=given.force)
        with plot.theme(given.theme), writing(path, force=given.force) as partial:
            plot.save(plot.spaces(file.adopted), partial)
        sizes = {space.name: len(space) for space in file.adopted.spaces}
        data = {"path": str(path), "kind": kind, "spaces": sizes, "version": file.adopted.version}
        return Outcome(f"wrote {path}", data)
    net = file.nets[place_of(file, given.net)].to(given.device)
    require_free(path, force=given.force)
    if not 0 <= given.transition < len(net.transitions):
        raise CommandError(
            f"no transition {given.transition}", f"transitions are 0 to {len(net.transitions) - 1}"
        )
    options = {}
    if kind == "graph":
        options["cut_since"] = given.since
    if kind == "adjacency":
        options["transition"] = given.transition
    with plot.theme(given.theme), writing(path, force=given.force) as partial:
        plot.save(getattr(plot, kind)(net, **options), partial)
    data = {
        "path": str(path),
        "kind": kind,
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
