"""`grapnet study`: runs the paper's studies, keeps finished seeds, and sets what they give beside
the paper.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grapnet.data import MissingDataError
from grapnet.integrations.extra import require

from .columns import plain
from .command import Command, CommandError, Outcome
from .suggestion import closest

if TYPE_CHECKING:
    from grapnet.studies.all import Registered

OUT = Path("runs/studies")
FAST_RUN = (
    "a fast run, on little or made-up data, only shows that everything works: it reaches no bar"
)
KEPT = "seeds"  # the folder below OUT that keeps finished seeds until their study is done


def studies_named(names: Sequence[str]) -> list[str]:
    """Returns the studies of that name, `all` standing for all; raises CommandError for another."""
    from grapnet.studies import all as studies

    for name in names:
        if name != "all" and name not in studies.NAMES:
            meant = closest(name, studies.NAMES)
            hint = f"did you mean {meant}? " if meant else ""
            raise CommandError(f"there is no study {name!r}", f"{hint}grapnet study lists them")
    return list(studies.NAMES) if "all" in names else list(dict.fromkeys(names))


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "studies", nargs="*", metavar="NAME", help="of a study, or all; without one they are listed"
    )
    parser.add_argument(
        "--fast", action="store_true", help="show in seconds that it works; reaches no bar"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="only the first N of its seeds; reaches no bar"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        metavar="FOLDER",
        help=f"for NAME.json and NAME.svg (default: {OUT})",
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help=f"where finished seeds are kept (default: {KEPT}/ of --out)",
    )
    again.add_argument(
        "--fresh", action="store_true", help="forget what an interrupted run has kept"
    )
    processes = os.cpu_count() or 1
    parser.add_argument(
        "--processes",
        type=int,
        default=processes,
        metavar="N",
        help=f"seeds at a time (default: {processes})",
    )
    parser.add_argument(
        "--plot",
        action="store_true",
        help="insist on the plot, which matplotlib draws if it is there",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if a bar was missed, and name it"
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="append a line of JSON there for every seed"
    )
    parser.add_argument(
        "--tensorboard", type=Path, metavar="FOLDER", help="write the numbers of the seeds there"
    )


def _run(given: argparse.Namespace) -> Outcome:
    from grapnet.studies import all as studies

    names = studies_named(given.studies)
    if not names:
        about = {name: studies.registered(name).about for name in studies.NAMES}
        return Outcome(
            f"The studies, each of one table or audit of the paper:\n{_listed()}",
            {"studies": about},
        )
    _require_possible(given)
    found = [studies.registered(name) for name in names]
    for study in found:
        _require_no_loss(study, given)
    texts, data, code = [], {}, 0
    for study in found:
        try:
            result = _result(study, given)
        except MissingDataError as error:
            if len(found) == 1:
                raise
            first = str(error).splitlines()[0]
            texts.append(f"## {study.name}\n\nIt was not run: {first}")
            data[study.name], code = {"error": first}, 1
            continue
        text, data[study.name] = _told(study, result, given)
        texts.append(text)
        code = max(code, int(given.check and bool(data[study.name]["missed"])))
    return Outcome("\n\n".join(texts), {"studies": data}, code)


def _require_possible(given: argparse.Namespace) -> None:
    """Raises CommandError for options that would only fail once hours have passed."""
    if given.seeds is not None and given.seeds < 2:
        raise CommandError(
            f"--seeds is at least 2, without which nothing has a spread, got {given.seeds}"
        )
    if given.processes < 1:
        raise CommandError(f"--processes is at least 1, got {given.processes}")
    if given.device.type != "cpu":
        raise CommandError(
            f"the studies run on the CPU, not on {given.device}", "leave --device out"
        )
    for module in ("scipy", "sklearn"):
        require(module, "studies")
    if given.plot and not _can_plot():
        raise CommandError(
            "--plot needs matplotlib, which is not installed", 'pip install "grapnet[studies]"'
        )
    for folder in (given.out, given.resume, given.tensorboard):
        if folder is not None:
            _require_writable(folder)


def _require_writable(folder: Path) -> None:
    """Raises CommandError when no file can be written into a folder; those that it makes to see it
    are gone again.
    """
    around = (folder, *folder.parents)
    for one in around:
        if one.exists() and not one.is_dir():
            raise CommandError(f"{one} is a file; name a folder")
    made = [one for one in around if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CommandError(
            f"{folder}: no file can be written there: {error.strerror}", "name another folder"
        ) from None
    finally:
        for one in made:
            with suppress(OSError):  # it was not made, or another has written into it
                one.rmdir()


def _require_no_loss(study: "Registered", given: argparse.Namespace) -> None:
    """Raises CommandError when a fast or short run would take the place of a full one."""
    from grapnet.studies.tables import report

    short = given.seeds is not None and given.seeds < len(study.settings.get("seeds", ()))
    if (given.fast or short) and (given.out / f"{study.name}.json").exists():
        there = report(study.name, given.out)
        if not there.problems:
            raise CommandError(
                f"{there.path} is of a full run, whose place a shorter one does not take",
                "choose another --out",
            )


def _result(study: "Registered", given: argparse.Namespace) -> dict[str, Any]:
    """Returns what a study gives, once it is written down; finished seeds are kept until then."""
    from grapnet.studies import command

    folder = given.resume or given.out / KEPT
    try:
        result = study.made(
            given.fast,
            given.seeds,
            processes=1 if given.fast else given.processes,
            folder=folder,
            fresh=given.fresh,
            log=given.log,
            tensorboard=given.tensorboard,
        )
    except command.Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        raise
    command.write_json(given.out / f"{study.name}.json", result)
    command.forget(result, folder)
    return result


def _told(
    study: "Registered", result: dict[str, Any], given: argparse.Namespace
) -> tuple[str, dict[str, Any]]:
    """Returns the table of a result with what it misses, and the same as plain data; draws it where
    it can.
    """
    from grapnet.plot import save
    from grapnet.studies.command import seeds_missed
    from grapnet.studies.drawing import drawn

    written = given.out / f"{study.name}.json"
    plot = written.with_suffix(".svg") if _can_plot() else None
    if plot is not None:
        save(drawn(study.draw, result), plot)
    short = [FAST_RUN] if given.fast else seeds_missed(study.settings.get("seeds", ()), result)
    missed = list(dict.fromkeys([*short, *study.missed(result)]))
    lines = missed if given.check else short
    parts = [f"## {study.name}", study.table(result)]
    said = "MISSED" if given.check else "Note:"
    parts += ["\n".join(f"{said} {line}" for line in lines)] if lines else []
    return "\n\n".join([*parts, f"Written: {written}" + (f" and {plot}" if plot else "")]), {
        "file": str(written),
        "plot": plot and str(plot),
        "seconds": result.get("seconds"),
        "seeds": result["settings"].get("seeds"),
        "missed": missed,
        "summary": plain(result.get("summary", result)),
    }


def _can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _listed() -> str:
    from grapnet.studies import all as studies

    return "\n".join(f"  {name:<20} {studies.registered(name).about}" for name in studies.NAMES)


COMMANDS = (
    Command(
        "study",
        "run a study of the paper, or all; an interrupted one goes on where it stopped",
        "The paper's studies",
        _configure,
        _run,
        (
            "study",
            "study localization --fast",
            "study all --out runs/studies --check",
            "study split_fashion --seeds 3 --log runs/split_fashion.jsonl",
        ),
    ),
)
