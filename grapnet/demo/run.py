"""Runs the demonstration and writes its folder: everything at the end, or nothing."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from grapnet._atomic import partial_folder
from grapnet.integrations.extra import require

from .display import Display
from .heads import Settings
from .story import tell

CHECKPOINT, JSON, REPORT = "digits.safetensors", "demo.json", "report.html"


def run(
    settings: Settings, out: Path, *, seed: int, device: torch.device, display: Display
) -> dict[str, Any]:
    """Tells the story, draws and writes it, and returns what `demo.json` holds.

    Args:
        settings: what to run.
        out: the folder to write into; files of an earlier run are replaced.
        seed: of everything random.
        device: where to compute.
        display: tells how far it is.

    Raises:
        ImportError: scikit-learn or matplotlib is not installed; nothing was run.
        OSError: the folder cannot be written into, and nothing was run; or it holds a folder that
            has the name of one of the files, and none was replaced.
    """
    for module in ("sklearn", "matplotlib"):
        require(module, "demo")
    from .pictures import draw
    from .report import report

    began = time.perf_counter()
    with written_at_once(out) as partial:
        story = tell(settings, seed, partial / CHECKPOINT, device, display)
        display.show(lambda: "  drawing …")
        pictures = draw(story, partial)
        numbers = story.numbers
        numbers["files"] = sorted([*(path.name for path in partial.iterdir()), JSON, REPORT])
        numbers["folder"], numbers["seconds"] = str(out), time.perf_counter() - began
        (partial / REPORT).write_text(report(numbers, pictures), encoding="utf-8")
        (partial / JSON).write_text(
            json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
    return numbers


@contextmanager
def written_at_once(out: Path) -> Iterator[Path]:
    """Gives a folder to write into, whose files go to `out` when the block ends well, and go away
    when it does not.

    Raises:
        IsADirectoryError: a folder in `out` has the name of one of the files; none was replaced.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]  # the innermost first
    try:
        out.mkdir(parents=True, exist_ok=True)
        with partial_folder(out, told=out) as partial:
            yield partial
            places = {path: out / path.name for path in sorted(partial.iterdir())}
            for place in places.values():
                if place.is_dir():
                    raise IsADirectoryError(
                        f"{str(place)!r} is a folder; a file of this name is to be written there"
                    )
            for path, place in places.items():
                os.replace(path, place)
    finally:
        for folder in made:  # those that hold nothing: it did not end well
            with suppress(OSError):
                folder.rmdir()
