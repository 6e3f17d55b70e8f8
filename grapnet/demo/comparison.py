"""The grown heads beside matched dense ones: the same stream, memory and updates, several seeds,
and one sentence.
"""

from statistics import fmean, stdev
from typing import Any

from scipy.stats import ttest_rel

from .chapters import accuracy
from .display import Display
from .heads import HEADS, Digits, Kind, Learner, Settings

STORY: Kind = "own"  # the head that the rest of the story edits


def compare(settings: Settings, seed: int, digits: Digits, display: Display) -> dict[str, Any]:
    """Returns the seen-class accuracies of all heads, in per cent, and the differences between them
    seed by seed.
    """
    seeds = range(seed, seed + settings.seeds)
    display.keep(f"Comparing with dense heads of as many parameters, {settings.seeds} seeds")
    heads: dict[str, Any] = {}
    for kind, name in HEADS.items():
        reached, parameters = [], 0
        for number in seeds:
            at = (
                f"{display.bar((number - seed) / settings.seeds)} seed"
                f" {number - seed + 1}/{settings.seeds}"
            )
            display.show(lambda name=name, at=at: f"  {name:<40} {at}")
            learner = Learner(kind, settings, digits, number)
            learner.learn()
            reached.append(100 * accuracy(learner.model, digits))
            parameters = learner.parameters
        mean = fmean(reached)
        std = stdev(reached)
        heads[kind] = {
            "name": name,
            "parameters": parameters,
            "seen_class": reached,
            "mean": mean,
            "std": std,
        }
        display.keep(f"  {name:<40} {mean:.1f} ± {std:.1f} %")
    differences = {
        f"{one} - {other}": _paired(heads[one]["seen_class"], heads[other]["seen_class"])
        for one in ("own", "seen")
        for other in ("dense", "control")
    }
    found = {"seeds": list(seeds), "heads": heads, "differences": differences}
    return {**found, "verdict": verdict(differences, settings.seeds)}


def _paired(a: list[float], b: list[float]) -> dict[str, float]:
    """Returns the mean difference of two heads over the seeds, and its 95 % interval."""
    interval = ttest_rel(a, b).confidence_interval(0.95)
    return {"mean": fmean(a) - fmean(b), "low": float(interval.low), "high": float(interval.high)}


def verdict(differences: dict[str, Any], seeds: int) -> str:
    """Returns what the measured differences say about growing, in one sentence.

    Examples:
        >>> level = {"mean": -0.4, "low": -1.5, "high": 0.7}
        >>> ahead = {"mean": 2.0, "low": 0.5, "high": 3.5}
        >>> said = verdict({"own - dense": ahead, "own - control": level}, 5)
        >>> "no difference from that control that 5 seeds can show" in said
        True
    """
    plain, control = (differences[f"{STORY} - {other}"] for other in ("dense", "control"))
    if control["low"] > 0:
        says = (
            "ahead of that control on these digits; on Split Fashion-MNIST it is behind (the"
            " README's studies), so growing is not by itself a better classifier"
        )
    elif control["high"] < 0:
        says = "behind that control, so growing is not by itself a better classifier"
    else:
        says = (
            f"no difference from that control that {seeds} seeds can show, so nothing here says"
            " that growing is by itself a better classifier"
        )
    return (
        f"The grown head has {_points(plain, ' points')} against dense as PyTorch makes it, and"
        f" {_points(control)} against dense with the same initial scale and a renewed Adam: {says}."
    )


def _points(difference: dict[str, float], unit: str = "") -> str:
    return f"{difference['mean']:+.1f}{unit} [{difference['low']:+.1f}, {difference['high']:+.1f}]"
