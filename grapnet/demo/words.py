"""What the demonstration found, in sentences made from its numbers; for the terminal and for the
report.
"""

import textwrap
from typing import Any

WIDTH = 79  # what every terminal shows in one row


def sentences(numbers: dict[str, Any]) -> dict[str, str]:
    """Returns one sentence or two a chapter, by its title."""
    growth, cut, freeze, sift, views, saved = (
        numbers[name] for name in ("growth", "cut", "freeze", "sift", "views", "saved")
    )
    task, others = cut["task"], [n for n in cut["changed_tasks"] if n != cut["task"]]
    restored, lost = (
        [name for name, same in cut["undo_restored"].items() if same == kind]
        for kind in (True, False)
    )
    return {
        "Grow": (
            f"{len(growth['tasks'])} tasks of two digits, one after the other, each with nodes of"
            f" its own: {_share(growth['seen_class'])} among all ten digits,"
            f" {_share(growth['task_local'])} when told the task,"
            f" {growth['tasks'][-1]['relations']:,} relations at version"
            f" {growth['tasks'][-1]['version']}."
        ),
        "Compare": numbers["comparison"]["verdict"],
        "Cut": (
            f"{cut['relations'][0] - cut['relations'][1]} relations that task {task} owns: it falls"
            f" from {_share(cut['before'][task - 1])} to {_share(cut['after'][task - 1])}; "
            + (
                f"task {_and(others)} changed too."
                if others
                else "the other tasks stay exactly as they were."
            )
        ),
        "Undo": (
            f"{_and(restored)} are back bit for bit" + (f"; {_and(lost)} are NOT." if lost else ".")
        ),
        "Freeze": (
            f"{freeze['coordinates']:,} coordinates of task {freeze['task']}. From here on the net"
            " trains on all digits at once, no longer task by task:"
            f" {_share(freeze['seen_class_before'])} before and {_share(freeze['seen_class'])}"
            f" after one epoch of it. What is frozen moved by {_exact(freeze['drift'])}, what task"
            f" {freeze['other_task']} owns by up to {freeze['other_drift']:.3f}."
        ),
        "Sift": (
            f"{_and(sift['rules'])} in one commit, with Adam attached: {_change(sift['relations'])}"
            f" relations, {_change(sift['nodes'])} hidden nodes."
            f" {_share(sift['seen_class_before'])} before, {_share(sift['seen_class_sifted'])}"
            f" right after, {_share(sift['seen_class'])} once trained on; a copy that was not"
            f" sifted reaches {_share(sift['seen_class_not_sifted'])} with the same training."
        ),
        "Views": (
            f"{_and(list(views['differences']))} agree with the walk from node to node to"
            f" {views['largest']:.1e}, with logits up to {views['largest_logit']:.1f}."
            + "".join(f" Without {name}: {why}." for name, why in views["refused"].items())
        ),
        "Save": (
            f"{saved['bytes']:,} bytes; the loaded net is"
            f" {'equal' if saved['loaded_equal'] else 'NOT equal'}. Undo in the copy:"
            f" {_change(saved['relations'])} relations"
            + (
                "; the original is untouched."
                if saved["original_untouched"]
                else "; the original CHANGED."
            )
        ),
    }


def summary(numbers: dict[str, Any]) -> str:
    """Returns what is printed at the end."""
    heads, found = numbers["comparison"]["heads"].values(), sentences(numbers)
    lines = [
        _entry("Grow", found.pop("Grow")),
        "",
        f"{'Seen-class accuracy':<41}{'parameters':>11}{'per cent':>15}",
    ]
    lines += [
        f"  {h['name']:<39}{h['parameters']:>11,}{h['mean']:>8.1f} ± {h['std']:>4.1f}"
        for h in heads
    ]
    lines += [textwrap.fill(found.pop("Compare"), WIDTH), ""]
    lines += [_entry(title, sentence) for title, sentence in found.items()]
    failed = [claim for claim, held in numbers["checks"].items() if not held]
    lines += ["", f"{len(numbers['checks']) - len(failed)} of {len(numbers['checks'])} checks held"]
    lines[-1] += f"; NOT: {_and(failed)}" if failed else ""
    files = ", ".join(name for name in numbers["files"] if name != "report.html")
    shown = (
        f"{numbers['folder']}/report.html shows it all; beside it {files}"
        f" ({numbers['seconds']:.0f} s)"
    )
    lines += [textwrap.fill(shown, WIDTH, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines)


def _entry(title: str, sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, initial_indent=f"{title:<8}", subsequent_indent=" " * 8)


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _exact(number: float) -> str:
    return "exactly 0" if number == 0 else f"{number:.1e}"


def _change(pair: list[int]) -> str:
    return f"{pair[0]:,} → {pair[1]:,}"


def _and(names: list[Any]) -> str:
    *most, last = map(str, names) if names else ("nothing",)
    return f"{', '.join(most)} and {last}" if most else last
