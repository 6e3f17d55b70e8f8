"""The report of the demonstration: what was done to the net and what came of it, on one page."""

from typing import Any

from grapnet.page import Picture, bar, checked, facts, figure, heading, page, paragraph, table

from .heads import TASKS
from .words import sentences


def report(numbers: dict[str, Any], pictures: dict[str, Picture]) -> str:
    """Returns `report.html`, made from the numbers of `demo.json`."""
    found = sentences(numbers)
    parts = [
        heading("A network that is edited while it learns", level=1),
        paragraph(
            "GrapNet on the 1,797 handwritten digits that ship with scikit-learn: five tasks of two"
            " digits each, task-1 to task-5, come one after the other, and are learnt with a small"
            " memory of earlier images. Then the net is cut and gets back what was cut, is frozen"
            " in part, sifted, run in every way there is, and saved. Every number below was"
            " measured in this run."
        ),
        _facts(numbers),
        *_grown(numbers, pictures, found),
        *_compared(numbers, found),
        *_cut(numbers, found),
        *_edited(numbers, pictures, found),
        *_run_and_saved(numbers, found),
        *_record(numbers, pictures),
    ]
    return page("GrapNet: the demonstration", parts)


def _facts(numbers: dict[str, Any]) -> str:
    cut, sift, views = numbers["cut"], numbers["sift"], numbers["views"]
    return facts(
        [
            (
                f"{100 * numbers['growth']['seen_class']:.1f} %",
                "accuracy among all ten digits after five tasks",
            ),
            (
                f"{len(cut['changed_tasks'])} of {len(TASKS)}",
                f"tasks changed when task {cut['task']} was cut",
            ),
            (
                "bit for bit" if all(cut["undo_restored"].values()) else "NOT equal",
                "what undo brought back",
            ),
            (f"{numbers['freeze']['drift']:g}", "how far frozen coordinates moved"),
            (
                f"{sift['relations'][0]:,} → {sift['relations'][1]:,}",
                "relations before and after the sift",
            ),
            (f"{views['largest']:.1e}", "largest difference between all ways to run the net"),
        ]
    )


def _grown(
    numbers: dict[str, Any], pictures: dict[str, Picture], found: dict[str, str]
) -> list[str]:
    rows = [
        [
            task["owner"],
            ", ".join(map(str, task["digits"])),
            f"{task['nodes']:,}",
            f"{task['relations']:,}",
            f"{task['updates']:,}",
            f"{100 * task['seen_class']:.1f}",
        ]
        for task in numbers["growth"]["tasks"]
    ]
    titles = [
        "task",
        "digits",
        "hidden nodes",
        "relations",
        "updates",
        "accuracy, all seen digits, %",
    ]
    return [
        heading("1 Grown task by task"),
        paragraph(found["Grow"]),
        table(titles, rows, right=range(2, 6)),
        figure(
            pictures["accuracy_matrix"],
            "How well each pair of digits was told from all digits seen so far, after every task.",
        ),
    ]


def _compared(numbers: dict[str, Any], found: dict[str, str]) -> list[str]:
    comparison = numbers["comparison"]
    rows = [
        [
            head["name"],
            f"{head['parameters']:,}",
            f"{head['mean']:.1f} ± {head['std']:.1f}",
            ", ".join(f"{accuracy:.1f}" for accuracy in head["seen_class"]),
        ]
        for head in comparison["heads"].values()
    ]
    return [
        heading("2 Beside matched dense heads"),
        table(
            ["head", "parameters", "accuracy, all ten digits, %", "seed by seed"],
            rows,
            right=(1, 2),
        ),
        paragraph(found["Compare"]),
        paragraph(
            f"Seeds {comparison['seeds'][0]} to {comparison['seeds'][-1]}; the same images in the"
            " same order, memory, updates and learning rate for every head; mean ± standard"
            " deviation, and 95 % intervals of the paired differences. How far heads lie apart"
            " depends on how long they learn: after the few updates of grapnet demo --fast the"
            " dense head of the same initial scale is well ahead of the grown ones.",
            "soft",
        ),
    ]


def _cut(numbers: dict[str, Any], found: dict[str, str]) -> list[str]:
    cut = numbers["cut"]
    rows = [
        [
            f"task {n}",
            ", ".join(map(str, digits)),
            *(bar(cut[when][n - 1]) for when in ("before", "after", "undone")),
        ]
        for n, digits in enumerate(TASKS, 1)
    ]
    return [
        heading("3 One task cut, and given back"),
        paragraph(found["Cut"]),
        table(
            ["task", "digits", "before, %", "after the cut, %", "after undo, %"],
            rows,
            fallen=cut["task"] - 1,
        ),
        paragraph("Accuracy of a choice between the two digits of each task.", "soft"),
        paragraph("Undo: " + found["Undo"]),
    ]


def _edited(
    numbers: dict[str, Any], pictures: dict[str, Picture], found: dict[str, str]
) -> list[str]:
    return [
        heading("4 Frozen, and trained on"),
        paragraph(found["Freeze"]),
        heading("5 Sifted, and trained on"),
        paragraph(found["Sift"]),
        figure(
            pictures["graph"],
            "The net at the end. Boxes are the nodes of one task, bands their relations; hatched"
            " ones are frozen, and dotted lines stand for what the sift cut.",
        ),
    ]


def _run_and_saved(numbers: dict[str, Any], found: dict[str, str]) -> list[str]:
    rows = [
        [name, f"{difference:.1e}"] for name, difference in numbers["views"]["differences"].items()
    ]
    return [
        heading("6 Every way to run it"),
        paragraph(found["Views"]),
        table(["computed by", "largest difference from the walk"], rows, right=(1,)),
        heading("7 Saved, loaded, undone"),
        paragraph(found["Save"]),
    ]


def _record(numbers: dict[str, Any], pictures: dict[str, Picture]) -> list[str]:
    rows = [
        [
            str(commit["version"]),
            commit["reason"],
            f"+{commit['nodes_added']:,} −{commit['nodes_removed']:,}",
            f"+{commit['relations_added']:,} −{commit['relations_removed']:,}",
            "" if commit["by"] in (None, commit["reason"]) else commit["by"],
        ]
        for commit in numbers["history"]
    ]
    said = [
        f"{name} {value}"
        for part in ("versions", "settings")
        for name, value in numbers[part].items()
        if value is not None
    ]
    return [
        heading("The journal"),
        table(["version", "reason", "nodes", "relations", "by"], rows, right=(0, 2, 3)),
        figure(
            pictures["timeline"],
            "Accuracy on all digits seen so far, by version. A mark is what the edit left, that of"
            " growth what its task ended with; upright lines are training between two edits.",
        ),
        heading("What was checked"),
        checked(numbers["checks"]),
        paragraph(f"{numbers['seconds']:.0f} seconds. " + ", ".join(said) + ".", "soft"),
    ]
