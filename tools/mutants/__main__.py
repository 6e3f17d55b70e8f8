"""Measures how many small changes of the library its tests notice.

`python -m tools.mutants --json FILE` draws mutants, as many of every operator in every area, and
runs each against those tests of its area that enter the function it changes. What was run before
is read from `--work`, so an interrupted run goes on where it stopped.
"""

import argparse
import ast
import atexit
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from .hook import sitecustomize as hook
from .sites import OPERATORS, Site, functions_of, is_mutant, sites_of

ROOT = Path(__file__).parents[2]
HOOK = Path(hook.__file__).parent


@dataclass(frozen=True)
class Area:
    """A part of the library and its tests; patterns are relative to the repository."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()


# Adopted models use these areas too, and have their tests in tests/spaces. What only runs on a GPU
# is left out.
AREAS = {
    "core": Area(
        ("grapnet/core/*.py",),
        (
            "tests/core/test_*.py",
            "tests/spaces/test_assign.py",
            "tests/spaces/test_depth.py",
            "tests/spaces/test_edits.py",
            "tests/spaces/test_relations.py",
        ),
    ),
    "execution": Area(
        ("grapnet/execution/*.py",),
        ("tests/execution/test_*.py", "tests/spaces/test_running.py"),
        without=("grapnet/execution/_gpu*.py",),
    ),
    "following": Area(
        ("grapnet/following/*.py",),
        (
            "tests/following/test_*.py",
            "tests/convert/test_optimizers*.py",
            "tests/execution/test_attention_following.py",
            "tests/spaces/test_depth.py",
            "tests/spaces/test_edits.py",
            "tests/spaces/test_memory.py",
        ),
        without=("grapnet/following/_capture.py", "grapnet/following/_watch.py"),
    ),
    "checkpoint": Area(
        ("grapnet/checkpoint/*.py",),
        (
            "tests/checkpoint/test_*.py",
            "tests/spaces/test_codeless.py",
            "tests/spaces/test_depth.py",
            "tests/spaces/test_files.py",
            "tests/spaces/test_relations.py",
        ),
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One changed program."""

    area: str
    site: Site

    @property
    def key(self) -> str:
        """A short name that is the same in every run of the same source."""
        source = (ROOT / self.site.file).read_bytes()
        return hashlib.sha256(source + self.site.name.encode()).hexdigest()[:16]


def draw(seed: int, count: int) -> list[Mutant]:
    """Returns `count` mutants of every operator in every area, or all that there are."""
    drawn = []
    for name, area in AREAS.items():
        paths = _matching(area.sources) - _matching(area.without)
        sites = []
        for path in sorted(paths):
            sites += sites_of(path, ROOT)
        for operator in OPERATORS:
            candidates = [site for site in sites if site.operator == operator]
            random.Random(f"{seed}/{name}/{operator}").shuffle(candidates)
            chosen = []
            for site in candidates:
                if len(chosen) < count and is_mutant(site, (ROOT / site.file).read_bytes()):
                    chosen.append(Mutant(name, site))
            drawn += chosen
    return drawn


def _matching(patterns: tuple[str, ...]) -> set[Path]:
    found = set()
    for pattern in patterns:
        found |= set(ROOT.glob(pattern))
    return found


def _tests_of(area: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in sorted(_matching(AREAS[area].tests))]


# Which tests enter which function


class Durations:
    """A pytest plugin that adds up the seconds of every test and notes which failed."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds one phase of a test."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)


def observe(area: str, mutants: list[Mutant], work: Path, jobs: int) -> dict[str, Any]:
    """Runs the tests of an area once, and returns their seconds and the functions they enter.

    Every function with a mutant in it gets a first statement that notes the call.
    """
    kept = work / f"reached-{area}.json"
    wanted = sorted({_function_name(mutant.site) for mutant in mutants if mutant.area == area})
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["functions"] == wanted:
            return found
    reached = work / f"reached-{area}.txt"
    reached.write_text("")
    texts = {}
    for file in sorted({mutant.site.file for mutant in mutants if mutant.area == area}):
        texts[file] = instrumented((ROOT / file).read_bytes(), file, set(wanted))
    durations = Durations()
    arguments = ["-q", "-n", str(jobs), "--dist", "loadfile", *_tests_of(area)]
    process = _Process(work, f"observe-{area}", texts, arguments, durations, reached=reached)
    process.wait()
    outcome = json.loads(process.outcome.read_text())
    failed = sorted(outcome["failed"])
    broken = _failing(area, failed, work)
    if broken:
        print(f"{area}: these tests fail without a mutant, and are left out: {broken}")
    found = {
        "functions": wanted,
        "seconds": {test: n for test, n in outcome["seconds"].items() if test not in broken},
        # Such a test, which counts compilations for instance, does not bear being observed.
        "always": [test for test in failed if test not in broken],
        "reached": by_function(reached.read_text()),
    }
    kept.write_text(json.dumps(found))
    return found


def _failing(area: str, tests: list[str], work: Path) -> list[str]:
    """Returns those of some tests that fail on the library as it is: they tell nothing."""
    if not tests:
        return []
    selection = Selection(tests)
    files = sorted({test.partition("::")[0] for test in tests})
    process = _Process(work, f"check-{area}", {}, ["-q", "-n", "0", *files], selection)
    process.wait()
    return json.loads(process.outcome.read_text())["failed"]


def _function_name(site: Site) -> str:
    return f"{site.file}:{site.function}"


def instrumented(source: bytes, file: str, wanted: set[str]) -> bytes:
    """Returns a source in which the wanted functions note that they are called."""
    lines = source.decode().splitlines(keepends=True)
    # From the end, so that line numbers above stay right.
    functions = sorted(functions_of(source), key=lambda item: -item[1].lineno)
    for name, function in functions:
        label = f"{file}:{name}"
        if label not in wanted:
            continue
        first = function.body[0]
        if _is_docstring(first) and len(function.body) > 1:
            first = function.body[1]
        # A body on the line of its `def` stays as it is; its tests are found by their file.
        if first.lineno > function.lineno and not _is_docstring(first):
            at = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
            indent = " " * first.col_offset
            lines.insert(at - 1, f"{indent}__reached__({label!r})\n")
    return "".join(lines).encode()


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def by_function(text: str) -> dict[str, list[str]]:
    """Returns for every function the tests that enter it; a file, where a fixture of it does.

    A call outside of any test happens while modules are imported, and concerns all tests: "".
    """
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        test, _, function = line.partition("\t")
        name, _, phase = test.rpartition(" ")
        if phase != "(call)":
            name = name.partition("::")[0]
        found.setdefault(function, set()).add(name)
    return {function: sorted(names) for function, names in found.items()}


def select_tests(mutant: Mutant, observed: dict[str, Any]) -> list[str]:
    """Returns the tests that may notice a mutant, those of quick files first."""
    names = set(observed["always"])
    reached = observed["reached"].get(_function_name(mutant.site), [])
    at_import = mutant.site.function == "" or "" in reached
    for test in observed["seconds"]:
        file = test.partition("::")[0]
        if at_import or test in reached or file in reached:
            names.add(test)
    seconds: defaultdict[str, float] = defaultdict(float)
    for test in names:
        seconds[test.partition("::")[0]] += observed["seconds"].get(test, 0.0)
    return sorted(names, key=lambda test: (seconds[test.partition("::")[0]], test))


# Running


class Selection:
    """A pytest plugin that runs some tests only, file by file in a given order; no tests: all."""

    def __init__(self, tests: list[str]) -> None:
        self._place = {test: number for number, test in enumerate(tests)}
        self._files: dict[str, int] = {}
        for test in tests:
            self._files.setdefault(test.partition("::")[0], len(self._files))
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the wanted tests; those of one file stay in their order."""
        if not self._place:
            return
        wanted = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(wanted, key=lambda item: self._files[item.nodeid.partition("::")[0]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes what failed."""
        if report.failed:
            self.failed.append(report.nodeid)


class _Process:
    """A child process that runs pytest over changed sources; torch is imported before it forks."""

    running: ClassVar[list["_Process"]] = []

    def __init__(
        self,
        work: Path,
        name: str,
        texts: dict[str, bytes],
        arguments: list[str],
        plugin: Any,
        *,
        seconds: float = float("inf"),
        reached: Path | None = None,
    ) -> None:
        self.folder = work / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.outcome = self.folder / "outcome.json"
        self.outcome.unlink(missing_ok=True)
        self.deadline = time.monotonic() + seconds
        self._arguments = [*arguments, "-p", "no:cacheprovider", "--timeout", "120"]
        self._arguments += ["--basetemp", str(self.folder / "tmp")]
        self._plugin = plugin
        self._environment = self._describe(texts, reached)
        self.pid = os.fork()
        if self.pid == 0:
            self._run()
        self.running.append(self)

    def _describe(self, texts: dict[str, bytes], reached: Path | None) -> dict[str, str]:
        sources = {}
        for number, (file, text) in enumerate(texts.items()):
            changed = self.folder / f"{number}.py"
            changed.write_bytes(text)
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            sources[module] = [str(ROOT / file), str(changed)]
        listed = self.folder / "sources.json"
        listed.write_text(json.dumps(sources))
        environment = {
            hook.SOURCES: str(listed),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / "hypothesis"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")]),
        }
        if reached is not None:
            environment[hook.REACHED] = str(reached)
        return environment

    def _run(self) -> None:
        """Runs in the child, and ends it."""
        os.setsid()
        log = os.open(self.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(self._environment)
        hook.install()
        code = int(pytest.main(self._arguments, plugins=[self._plugin]))
        found = {
            "code": code,
            "failed": sorted(self._plugin.failed),
            "seconds": dict(self._plugin.seconds),
        }
        self.outcome.write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(code)

    def poll(self) -> int | None:
        """Returns the status of the process, or None while it runs; ends it after its time."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0 and time.monotonic() > self.deadline:
            os.killpg(self.pid, signal.SIGKILL)
            pid, status = os.waitpid(self.pid, 0)
        if pid == 0:
            return None
        self.running.remove(self)
        return status

    @classmethod
    def end_all(cls) -> None:
        """Ends every process that still runs, with the processes below it."""
        for process in cls.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Waits for the process."""
        while self.poll() is None:
            time.sleep(0.2)


def judge(process: _Process) -> tuple[str, str]:
    """Returns whether the tests noticed a mutant, and what noticed it."""
    if time.monotonic() > process.deadline:
        return "killed", "time ran out"
    if not process.outcome.exists():
        return "killed", "the process ended"
    found = json.loads(process.outcome.read_text())
    if found["code"] == pytest.ExitCode.OK:
        return "survived", ""
    if found["failed"]:
        return "killed", found["failed"][0]
    return "killed", "the import"


def run(mutants: list[Mutant], observed: dict[str, Any], work: Path, jobs: int) -> None:
    """Runs mutants, several at a time, and appends one line to results.jsonl for each."""
    waiting = list(mutants)
    running: list[tuple[Mutant, list[str], _Process]] = []
    total = len(mutants)
    done = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            tests = select_tests(mutant, observed[mutant.area])
            if not tests:
                _append(work, mutant, "survived", "no test enters it", 0)
                continue
            running.append((mutant, tests, _start(mutant, tests, observed[mutant.area], work)))
        time.sleep(0.05)
        for item in list(running):
            mutant, tests, process = item
            if process.poll() is not None:
                running.remove(item)
                outcome, by = judge(process)
                _append(work, mutant, outcome, by, len(tests))
                done += 1
                site = mutant.site
                print(
                    f"{done}/{total} {outcome} {site.file}:{site.line} {site.operator} {by}",
                    flush=True,
                )


def start_controls(observed: dict[str, Any], work: Path) -> dict[str, _Process]:
    """Starts all tests of every area where nothing is changed, in the same way as for a mutant."""
    processes = {}
    for area, found in observed.items():
        if not (work / f"control-{area}" / "passed").exists():
            selection = Selection(sorted(found["seconds"]))
            arguments = ["-q", "-n", "0", *_tests_of(area)]
            processes[area] = _Process(work, f"control-{area}", {}, arguments, selection)
    return processes


def finish_controls(processes: dict[str, _Process]) -> None:
    """Waits for the controls, and exits unless all of their tests passed."""
    for area, process in processes.items():
        process.wait()
        outcome, by = judge(process)
        if outcome != "survived":
            raise SystemExit(f"the tests of {area} fail without a mutant: {by}")
        (process.folder / "passed").touch()


def _start(mutant: Mutant, tests: list[str], observed: dict[str, Any], work: Path) -> _Process:
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    expected = sum(observed["seconds"].get(test, 0.0) for test in tests)
    arguments = ["-q", "-x", "-n", "0", *files]
    seconds = 90 + 5 * expected
    return _Process(work, mutant.key, _texts(mutant), arguments, Selection(tests), seconds=seconds)


def _texts(mutant: Mutant) -> dict[str, bytes]:
    source = (ROOT / mutant.site.file).read_bytes()
    return {mutant.site.file: mutant.site.applied_to(source)}


def _append(work: Path, mutant: Mutant, outcome: str, by: str, tests: int) -> None:
    row = {"key": mutant.key, "outcome": outcome, "by": by, "tests": tests}
    with open(work / "results.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def finished(work: Path) -> dict[str, dict[str, Any]]:
    """Returns the rows of every mutant that was run, by key."""
    path = work / "results.jsonl"
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row.pop("key"): row for row in rows}


def report(mutants: list[Mutant], rows: dict[str, Any], classes: dict[str, Any]) -> dict[str, Any]:
    """Returns what is committed: counts by area and operator, and every mutant that survived."""
    counts: dict[str, Any] = {}
    outcomes: Counter[str] = Counter()
    survivors = []
    for mutant in mutants:
        row = rows.get(mutant.key)
        if row is None:
            continue
        place = counts.setdefault(mutant.area, {}).setdefault(mutant.site.operator, Counter())
        place[row["outcome"]] += 1
        outcomes[row["outcome"]] += 1
        if row["outcome"] == "survived":
            reason = classes.get(mutant.key, {"class": "not classified"})
            survivors.append(
                {"key": mutant.key, "area": mutant.area, **asdict(mutant.site)} | reason
            )
    by_class = Counter(entry["class"] for entry in survivors)
    summary = {"mutants": outcomes.total(), **outcomes, "survivors": dict(by_class)}
    return {"summary": summary, "counts": counts, "survivors": survivors}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="tools.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=14, help="mutants of an operator in an area")
    parser.add_argument("--areas", nargs="*", choices=AREAS, default=list(AREAS))
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutants")
    parser.add_argument("--json", type=Path, help="the report; it keeps the classes of survivors")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)

    mutants = draw(given.seed, given.count)
    mine = [mutant for mutant in mutants if mutant.area in given.areas]
    rows = finished(given.work)
    left = [mutant for mutant in mine if mutant.key not in rows]
    print(f"{len(mine)} mutants, {len(left)} to run", flush=True)
    if left:
        # Imported here, so that the forked processes do not import it again.
        import torch  # noqa: F401

        areas = sorted({mutant.area for mutant in left})
        observed = {area: observe(area, mutants, given.work, given.jobs) for area in areas}
        # Ends the processes below this one, too, when it is asked to end.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        atexit.register(_Process.end_all)
        controls = start_controls(observed, given.work)
        run(left, observed, given.work, given.jobs)
        finish_controls(controls)

    # A person has written why each of them survived.
    classes = {}
    if given.json is not None and given.json.exists():
        for entry in json.loads(given.json.read_text())["survivors"]:
            classes[entry["key"]] = {
                name: entry[name] for name in ("class", "why") if name in entry
            }
    made = report(mutants, finished(given.work), classes)
    made = {"seed": given.seed, "count": given.count, **made}
    print(json.dumps(made["summary"]))
    if given.json is not None:
        given.json.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
