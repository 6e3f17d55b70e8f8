"""The way that every edit takes from the shell: open a file, edit its net, tell what happened,
write another file.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import grapnet as gn

from .carried import FollowingOptimizer
from .childless import Childless, hidden_nodes, left_childless
from .command import CommandError, Outcome
from .effect import Counted, Effect
from .files import add_file, add_output, require_free, write_checkpoint
from .opened import Opened, open_checkpoint
from .retagged import tags_of

# edits a net, or leaves it alone where nothing is to be done
Act = Callable[[gn.GrapNet, argparse.Namespace], None]


def add_shared(parser: argparse.ArgumentParser, *, reason: bool = True) -> None:
    """Adds what all commands that edit have in common."""
    add_file(parser)
    add_output(parser, "where to write the edited checkpoint")
    parser.add_argument("--in-place", action="store_true", help="write it over FILE")
    parser.add_argument(
        "--dry-run", action="store_true", help="tell what would happen, and write nothing"
    )
    if reason:
        parser.add_argument(
            "--reason", metavar="TEXT", help="why, for the journal (default: the options)"
        )
    parser.add_argument("--net", metavar="PLACE", help="which net of a model that has several")
    parser.add_argument(
        "--undo",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep in NEW what undo needs, cut weights included (default: as FILE does)",
    )
    extras = parser.add_argument_group(
        "what the file holds beside the net", "follows, or stops the edit if it cannot"
    )
    extras.add_argument(
        "--drop", action="append", default=[], metavar="NAME", help="leave it out (repeatable)"
    )
    extras.add_argument(
        "--keep", action="append", default=[], metavar="NAME", help="leave it as it is (repeatable)"
    )


def run_edit(verb: str, act: Act, given: argparse.Namespace) -> Outcome:
    """Edits the net of a file and writes another, or only tells what would happen.

    The net is made from the file and nobody else has it, so a dry run is the whole edit without the
    writing.
    """
    output = _destination(given)
    opened = open_checkpoint(
        given.file, place=given.net, undo=given.undo, drop=given.drop, keep=given.keep
    )
    before, tags, parents = (
        Counted.of(opened.net),
        tags_of(opened.net),
        hidden_nodes(opened.net, childless=False),
    )
    try:
        act(opened.net, given)
    except gn.OptimizerError as error:
        raise CommandError(
            str(error).splitlines()[0], "--drop NAME leaves an optimizer's state out"
        ) from None
    effect = Effect.of(before, tags, opened.net, opened.edits.commits)
    if effect.is_empty:
        told = (
            f"nothing matched, or all of it is so already: {verb} changes nothing in {given.file};"
            " nothing was written"
        )
        return Outcome(told, {"command": verb, "changed": False, "written": None}, code=1)
    gn.check(opened.net)
    document, tensors = opened.content()
    if output is not None:
        write_checkpoint(output, document, tensors, force=given.force or given.in_place)
    childless = left_childless(opened.net, parents, opened.place)
    return _told(verb, given, opened, effect, childless, output)


def _destination(given: argparse.Namespace) -> Path | None:
    """Returns where to write, None for a dry run; raises CommandError when that is not said, or is
    taken.
    """
    if given.output is not None and given.in_place:
        raise CommandError("-o and --in-place say two places to write to", "leave one out")
    if given.output is not None:
        if (
            not given.force
            and given.output.exists()
            and given.file.exists()
            and given.output.samefile(given.file)
        ):
            raise CommandError(
                f"{given.output} is the file to edit", "say --in-place to write over it"
            )
        require_free(given.output, force=given.force)
    elif given.in_place and given.file.is_file():  # all else cannot be read either
        require_free(given.file, force=True)
    elif not (given.in_place or given.dry_run):
        raise CommandError("nothing says where to write", "say -o NEW, --in-place or --dry-run")
    return None if given.dry_run else given.file if given.in_place else given.output


def _told(
    verb: str,
    given: argparse.Namespace,
    opened: Opened,
    effect: Effect,
    childless: Childless,
    output: Path | None,
) -> Outcome:
    commit = opened.net.history[-1]
    extras = {name: carried.how for name, carried in opened.carried.items()}
    extras |= dict.fromkeys(opened.dropped, "dropped")
    lines = [
        f"{'dry run of ' if output is None else ''}{verb}: {commit.reason!r}, {effect}",
        *effect.lines(),
        *childless.lines(),
    ]
    lines += (
        [f"extras: {', '.join(f'{name} {how}' for name, how in extras.items())}"] if extras else []
    )
    followed = {
        name: one for name, one in opened.carried.items() if isinstance(one, FollowingOptimizer)
    }
    cleared = {name: one.cleared(opened.edits.commits) for name, one in followed.items()}
    back = "; undo of this edit brings it back" if opened.undo else ""
    lines += [
        f"  {name}: {one}{back if one.left_out else ''}"
        for name, one in cleared.items()
        if any(one)
    ]
    lines += [f"undo: {'kept' if opened.undo else 'not kept (--undo keeps it)'}"]
    lines += ["nothing was written" if output is None else f"wrote {output}"]
    data = {
        "command": verb,
        "file": str(given.file),
        "net": opened.place or None,
        "changed": True,
        "dry_run": output is None,
        "reason": commit.reason,
        "effect": effect.data(),
        "childless": childless.data(),
        "extras": extras,
        "optimizer_state": {name: one._asdict() for name, one in cleared.items()},
        "undo": opened.undo,
        "written": None if output is None else str(output),
    }
    return Outcome("\n".join(lines), data)
