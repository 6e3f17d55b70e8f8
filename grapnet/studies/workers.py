"""Seeds over processes, each on one thread, which end with the process that started them."""

import functools
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from typing import Any

import torch

from .interrupts import held_back, kept_from_processes

OneSeed = Callable[[Any, int], dict[str, Any]]


def computed(
    one_seed: OneSeed, settings: Any, seeds: Sequence[int], processes: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields every seed with its numbers as they are done.

    A seed that fails is raised once the others are done. On any other error, Ctrl-C among them, the
    processes are ended at once.

    Args:
        one_seed: computes the numbers of a seed, as plain data; a function of a module, for
            processes to import.
        settings: its first argument.
        seeds: its second.
        processes: how many seeds run at a time; 1 is this process.
    """
    one = functools.partial(_on_one_thread, one_seed, settings)
    if min(processes, len(seeds)) <= 1:
        yield from ((seed, one(seed)) for seed in seeds)
        return
    spawn = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        min(processes, len(seeds)), spawn, initializer=_end_with_parent
    ) as pool:
        try:
            with held_back(), kept_from_processes():
                running, failed = {pool.submit(one, seed): seed for seed in seeds}, []
            for done in as_completed(running):
                if done.exception() is None:
                    yield running[done], done.result()
                else:
                    failed.append(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
    for done in failed[:1]:  # once what the others found is kept
        done.result()


def _end_with_parent() -> None:
    """Makes a process end when the one that started it does, in whatever way: a pool alone would
    leave it waiting.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _on_one_thread(one_seed: OneSeed, settings: Any, seed: int) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return json.loads(json.dumps(one_seed(settings, seed)))
    finally:
        torch.set_num_threads(before)
