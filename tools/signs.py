"""Counts the signs of a code base that is easy to read, so that changes can be compared.

Run it in the root of the repository: `python -m tools.signs [--json PATH]`. Only the time
of the import runs the library; everything else is read from the source text.
"""

import argparse
import ast
import io
import json
import os
import statistics
import subprocess
import symtable
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {
    "wheel": ("grapnet",),
    "studies": ("studies",),
    "wheel+studies": ("grapnet", "studies"),
    "tests": ("tests",),
    "programs": ("benchmarks", "examples", "tools"),
}
PACKAGE = "grapnet"
COLUMNS = 100
IMPORTS = 7
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"

WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def python_files(root: Path, folders: Iterable[str]) -> list[Path]:
    """Returns the Python files below some folders, each once; a missing folder has none."""
    found: set[Path] = set()
    for folder in folders:
        found.update((root / folder).rglob("*.py"))
    return sorted(found)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines that docstrings occupy, counted from one."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            numbers.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return numbers


def comment_lines(text: str) -> set[int]:
    """Returns the numbers of the lines that hold a comment and nothing else."""
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            numbers.add(token.start[0])
    return numbers


def count_lines(text: str, tree: ast.Module) -> dict[str, int]:
    """Counts lines, own-line comments, lines of code, long ones, and characters of code.

    A line of code is not blank, not part of a docstring and not a comment alone. Its characters
    include the indentation.
    """
    comments = comment_lines(text)
    left_out = comments | docstring_lines(tree)
    lines = [line.rstrip() for line in io.StringIO(text)]
    code = [line for n, line in enumerate(lines, start=1) if line and n not in left_out]
    return {
        "lines": len(lines),
        "code_lines": len(code),
        "code_characters": sum(len(line) for line in code),
        "long_code_lines": sum(len(line) > COLUMNS for line in code),
        "own_line_comments": len(comments),
    }


def is_parallel(node: ast.AST) -> bool:
    """Returns whether a node assigns a tuple of expressions to a tuple of as many targets.

    `a, b = f(x), g(y)` does, and so does the swap `a, b = b, a`. Unpacking one value does not.
    """
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    size = len(node.value.elts)
    return any(
        isinstance(target, ast.Tuple) and len(target.elts) == size for target in node.targets
    )


def count_expressions(tree: ast.Module) -> dict[str, int]:
    """Counts parallel assignments, conditional expressions and comprehensions.

    Generator expressions are comprehensions too. A nested comprehension has more than one `for`;
    those inside another comprehension are counted separately.
    """
    nodes = list(ast.walk(tree))
    comprehensions = [node for node in nodes if isinstance(node, COMPREHENSIONS)]
    inner: set[ast.AST] = set()
    for outer in comprehensions:
        parts = [part for part in ast.walk(outer) if isinstance(part, COMPREHENSIONS)]
        inner.update(part for part in parts if part is not outer)
    return {
        "parallel_assignments": sum(is_parallel(node) for node in nodes),
        "conditional_expressions": sum(isinstance(node, ast.IfExp) for node in nodes),
        "comprehensions": len(comprehensions),
        "nested_comprehensions": sum(len(node.generators) > 1 for node in comprehensions),
        "comprehensions_inside_another": len(inner),
    }


def count_text(text: str) -> dict[str, int]:
    """Returns all counts of one source text."""
    tree = ast.parse(text)
    return count_lines(text, tree) | count_expressions(tree)


def count_files(paths: Sequence[Path]) -> dict[str, float]:
    """Returns the sums of all counts over some files, and three rates per 1,000 lines of code."""
    total: Counter[str] = Counter(files=len(paths))
    # Nothing to count gives every sum a zero, also for a group without files.
    total.update(count_text(""))
    for path in paths:
        total.update(count_text(path.read_text(encoding="utf-8")))
    thousands = max(total["code_lines"], 1) / 1000
    result: dict[str, float] = dict(total)
    for name in ("long_code_lines", "conditional_expressions", "comprehensions"):
        result[f"{name}_per_1000"] = round(total[name] / thousands, 1)
    return result


def modules_of(package: Path) -> dict[str, Path]:
    """Returns the files of a package by the absolute names of their modules."""
    found: dict[str, Path] = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def package_of(name: str, path: Path) -> str:
    """Returns the package a module belongs to; an `__init__` belongs to its own."""
    if path.name == "__init__.py":
        return name
    return name.rpartition(".")[0]


def imported_names(text: str, package: str) -> set[str]:
    """Returns the absolute names that a module of a package imports, wherever in the file.

    `from a import b` gives `a` and `a.b`, because `b` may be a module. Imports in functions and
    under TYPE_CHECKING are included; names given to importlib as strings are not.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the module's own package, every further dot the package around it.
            around = package.split(".")[: package.count(".") + 2 - node.level]
            source = node.module or ""
            if node.level:
                source = ".".join([*around, source]).rstrip(".")
            names.add(source)
            names.update(f"{source}.{alias.name}" for alias in node.names)
    return names


def importers_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Returns for every module the names of the modules that import it."""
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        found = imported_names(path.read_text(encoding="utf-8"), package_of(name, path))
        for imported in found & modules.keys() - {name}:
            importers[imported].add(name)
    return importers


def single_importers(package: Path) -> dict[str, dict[str, str]]:
    """Returns the modules with exactly one importer, and the importer, by two definitions.

    `without_init` ignores imports by an `__init__`. `with_init` counts them, but leaves out the
    modules that only the `__init__` of their own package imports.
    """
    modules = modules_of(package)
    inits = {name for name, path in modules.items() if path.name == "__init__.py"}
    without_init: dict[str, str] = {}
    with_init: dict[str, str] = {}
    for name, importers in sorted(importers_of(modules).items()):
        if name in inits:
            continue
        if len(importers - inits) == 1:
            without_init[name] = min(importers - inits)
        if len(importers) == 1 and package_of(name, modules[name]) not in importers:
            with_init[name] = min(importers)
    return {"without_init": without_init, "with_init": with_init}


def public_names(text: str) -> list[str]:
    """Returns the names an `__init__` offers: its `__all__`, or else what it binds in public."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    symbols = symtable.symtable(text, "__init__.py", "exec").get_symbols()
    bound = [symbol for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    return sorted(symbol.get_name() for symbol in bound if symbol.get_name()[0] != "_")


def cpu_seconds(program: str) -> float:
    """Returns the CPU time of a new process that runs a program, including Python's start."""
    command = [sys.executable, "-c", f"{program}\nimport time\nprint(time.process_time())"]
    # As an installed package, which Python compiles once.
    environment = {key: value for key, value in os.environ.items() if key != NO_BYTECODE}
    done = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment
    )
    return float(done.stdout.split()[-1])


def median_difference(
    measure: Callable[[str], float], base: str, program: str, repetitions: int
) -> float:
    """Returns the median of what a program takes beyond another, measured in turn."""
    # The first run of each may compile modules and read them from the disk.
    measure(base)
    measure(program)
    differences: list[float] = []
    for _ in range(repetitions):
        less = measure(base)
        differences.append(measure(program) - less)
    return statistics.median(differences)


def collect() -> dict[str, Any]:
    """Returns all signs of this repository as they are written to JSON."""
    signs: dict[str, Any] = {}
    for group, folders in GROUPS.items():
        signs[group] = count_files(python_files(ROOT, folders))
    signs["one_importer"] = single_importers(ROOT / PACKAGE)
    signs["top_level_names"] = public_names((ROOT / PACKAGE / "_api.py").read_text("utf-8"))
    seconds = median_difference(cpu_seconds, "import torch", "import torch, grapnet._api", IMPORTS)
    signs["import_cpu_seconds"] = round(seconds, 2)
    return signs


def table(signs: dict[str, Any]) -> str:
    """Returns the signs as text: a column for each group of files, then the other numbers."""
    rows = [" " * 34 + "".join(f"{group:>14}" for group in GROUPS)]
    for name in signs["wheel"]:
        cells = "".join(f"{signs[group][name]:>14,}" for group in GROUPS)
        rows.append(f"{name:34}{cells}")
    importers = signs["one_importer"]
    rows.append("")
    rows.append(f"modules with one importer, __init__ left out: {len(importers['without_init'])}")
    rows.append(f"modules with one importer, __init__ counted: {len(importers['with_init'])}")
    rows.append(f"top-level names: {len(signs['top_level_names'])}")
    rows.append(f"CPU seconds of the import beyond torch: {signs['import_cpu_seconds']}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the JSON if asked to."""
    summary = "Count the signs of a code base that is easy to read."
    parser = argparse.ArgumentParser(prog="python -m tools.signs", description=summary)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the signs to this file")
    options = parser.parse_args(arguments)
    signs = collect()
    print(table(signs))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(signs, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
