"""The story of the demonstration: grow, compare, cut, undo, freeze, sift, run, save; and what holds
at its end.
"""

import platform
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import grapnet as gn
from grapnet.learning import AccuracyMatrix, Step, Task, evaluate

from . import chapters
from .comparison import compare
from .display import Display
from .heads import TASKS, Digits, Learner, Settings, load_digits, owner_of

AGREEMENT = 1e-5  # of the largest logit: how far two ways to compute a sum in float32 may lie apart


class Story(NamedTuple):
    """What came out: all numbers as plain data, and what the pictures are drawn from."""

    numbers: dict[str, Any]
    net: gn.GrapNet
    matrix: AccuracyMatrix
    # version of the net, and its accuracy on all digits seen so far
    scores: list[tuple[int, float]]


def tell(
    settings: Settings, seed: int, checkpoint: Path, device: torch.device, display: Display
) -> Story:
    """Runs the whole story and writes nothing but the checkpoint.

    Args:
        settings: what to run.
        seed: of the net that is edited, and the first of the comparison.
        checkpoint: where to save the net.
        device: where to compute.
        display: tells how far it is.
    """
    began, digits = time.perf_counter(), load_digits(device)
    learner, matrix = Learner("own", settings, digits, seed), AccuracyMatrix()
    numbers: dict[str, Any] = {"growth": _grow(learner, digits, matrix, display)}
    scores = [(task["version"], task["seen_class"]) for task in numbers["growth"]["tasks"]]
    numbers["comparison"] = compare(settings, seed, digits, display)
    scene = chapters.Scene(learner, digits, scores, seed)
    for name in ("cut", "freeze", "sift", "views"):
        display.show(lambda name=name: f"  {name} …")
        numbers[name] = getattr(chapters, name)(scene)
    numbers["saved"] = chapters.save(scene, checkpoint)
    numbers["history"] = [
        {
            "version": commit.version,
            "reason": commit.reason,
            "by": commit.by,
            **commit.counts,
        }
        for commit in learner.net.history
    ]
    numbers["checks"] = checks(numbers)
    numbers["settings"] = {
        **asdict(settings),
        "seed": seed,
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    numbers["versions"] = {
        "grapnet": gn.__version__,
        "torch": torch.__version__,
        "scikit-learn": version("scikit-learn"),
        "python": platform.python_version(),
    }
    numbers["seconds"] = time.perf_counter() - began
    return Story(numbers, learner.net, matrix, scores)


def checks(numbers: dict[str, Any]) -> dict[str, bool]:
    """Returns what the demonstration claims, and whether it held."""
    cut, freeze, sift, views, saved = (
        numbers[name] for name in ("cut", "freeze", "sift", "views", "saved")
    )
    return {
        "only the cut task fell": (
            cut["changed_tasks"] == [cut["task"]]
            and cut["after"][cut["task"] - 1] < cut["before"][cut["task"] - 1]
        ),
        "undo brought all back bit for bit": (
            all(cut["undo_restored"].values()) and cut["undone"] == cut["before"]
        ),
        "frozen coordinates moved by exactly 0, free ones moved": (
            freeze["drift"] == 0 < freeze["other_drift"]
        ),
        "the sift cut what its dry run announced": (
            sift["relations"][0] - sift["relations"][1] == sift["planned_cut"]
        ),
        "Adam followed the sift": sift["optimizer_coordinates"] == sift["trainable"],
        "all views agree": views["largest"] <= AGREEMENT * views["largest_logit"],
        "the loaded net is equal": saved["loaded_equal"],
        "undo in the copy left the original alone": (
            saved["original_untouched"] and saved["relations"] == sift["relations"][::-1]
        ),
    }


def _grow(
    learner: Learner, digits: Digits, matrix: AccuracyMatrix, display: Display
) -> dict[str, Any]:
    """Learns one task after the other, with nodes of its own for each, and measures after every
    one.
    """
    net, tasks, done = learner.net, [], 0  # updates before the present task

    def line(task: Task, step: int, accuracy: float) -> str:
        steps = len(task) * learner.settings.updates
        at = f"  {display.bar(step / steps)}" if display.live and step < steps else ""
        return (
            f"task {task.number + 1}/{len(TASKS)}: digits {', '.join(map(str, task.classes))}  step"
            f" {step:>3}/{steps}  accuracy {accuracy:6.1%}  relations {net.count().relations:>6,} "
            f" version {net.version}{at}"
        )

    def after_step(step: Step) -> None:
        task = step.task
        display.show(
            lambda: line(
                task, step.number + 1 - done, chapters.accuracy(net, digits, task.number + 1)
            )
        )

    def after_task(task: Task) -> None:
        nonlocal done
        steps = len(task) * learner.settings.updates
        found = evaluate(net, digits.test_x, digits.test_y, TASKS[: task.number + 1])
        done += steps
        matrix.add(found)
        tasks.append(
            {
                "owner": owner_of(task.number + 1),
                "digits": list(task.classes),
                "seen_class": found.overall,
                "by_task": found.seen,
                "nodes": net.sizes[1],
                "relations": net.count().relations,
                "version": net.version,
                "updates": steps,
            }
        )
        display.keep(line(task, steps, found.overall))

    display.keep("Growing a head for five tasks of two digits, one after the other, with replay")
    learner.learn(after_step, after_task)
    return {
        "tasks": tasks,
        "seen_class": matrix.seen_class,
        "task_local": matrix.task_local,
        "forgetting": matrix.forgetting,
    }
