"""Kills a process at random moments of its saves and looks at what is left; reports as JSON.

python -m tests.checkpoint.crash FOLDER KILLS
"""

import json
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import grapnet as gn

NOTE = struct.Struct("<?q")  # finished?, number of the save


class Library:
    """Saves and loads with gn.save and gn.load; the content of a save is its number, 62,750
    times.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.net = gn.GrapNet([250, 250])

    def save(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.fill_(number)
        gn.save(self.path, self.net)

    def number(self) -> int | None:
        """Returns the number of the save that the file holds, or None when it is not whole."""
        try:
            net = gn.load(self.path)
        except gn.errors.CheckpointError:
            return None
        values = torch.cat([parameter.flatten() for parameter in net.parameters()])
        return int(values[0]) if bool((values == values[0]).all()) else None


def save_for_ever(library: Library, first: int, pipe: int) -> None:
    """Saves under growing numbers, and notes each before it begins and once it is finished."""
    for number in range(first, first + 1000):
        os.write(pipe, NOTE.pack(False, number))
        library.save(number)
        os.write(pipe, NOTE.pack(True, number))


def kill_one(library: Library, first: int, notes: int, wait: float) -> tuple[int, int | None]:
    """Kills a process that saves `wait` seconds after some of its notes; returns its last begun and
    finished save.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(library, first, writer)
        finally:
            os._exit(1)
    os.close(writer)
    read = b"".join(os.read(reader, NOTE.size) for _ in range(notes))
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while chunk := os.read(reader, 1 << 16):
        read += chunk
    os.close(reader)
    begun = first
    finished = None
    for done, number in NOTE.iter_unpack(read):
        begun, finished = (begun, number) if done else (number, finished)
    return begun, finished


def main(folder: Path, kills: int, library: Library) -> dict[str, Any]:
    """Kills `kills` saving processes, one after the other, and returns what became of the file."""
    rng = random.Random(1)
    counts = Counter[str]()
    library.save(1)
    start = time.perf_counter()
    library.save(1)
    once = time.perf_counter() - start
    safe = 1
    for n in range(1, kills + 1):
        begun, finished = kill_one(
            library, 1000 * n, rng.choice([1, 3]), rng.uniform(0, 1.2 * once)
        )
        safe = safe if finished is None else finished
        found = library.number()
        partial = list(folder.glob(".*partial"))
        counts["kills"] += 1
        counts["after acknowledged saves"] += finished is not None
        counts["left a partial file"] += bool(partial)
        counts["unreadable"] += found is None
        counts["lost an acknowledged save"] += found is not None and found < safe
        counts["not one of the two it can be"] += found not in (None, safe, begun)
        for left in partial:
            shutil.rmtree(left)
        if found is None:
            library.save(1000 * n)
            safe = 1000 * n
        else:
            safe = found
    return dict(counts)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(json.dumps(main(folder, int(sys.argv[2]), Library(folder / "net.ckpt"))))
