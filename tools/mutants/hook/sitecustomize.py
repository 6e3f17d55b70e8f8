"""Loads changed source texts in every Python process below a run of mutants.

Python imports this module by itself, because its folder is on PYTHONPATH. The environment names a
JSON file {module name: [path of the module, path of the text to load instead]}.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path

SOURCES = "MUTANT_SOURCES"  # the JSON file
REACHED = "MUTANT_REACHED"  # where to note which functions a test enters


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str):
        return compile(Path(self._text).read_bytes(), self.path, "exec", dont_inherit=True)


class _Finder:
    def __init__(self, sources: dict[str, list[str]]) -> None:
        self._sources = sources

    def find_spec(self, name: str, path: object = None, target: object = None):
        if name not in self._sources:
            return None
        file, text = self._sources[name]
        folders = None
        if file.endswith("__init__.py"):
            folders = [os.path.dirname(file)]
        loader = _Loader(name, file, text)
        return importlib.util.spec_from_file_location(
            name, file, loader=loader, submodule_search_locations=folders
        )


class _Reached:
    """Notes each function once for every test: a line "test phase, tab, function" in a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._test = ""
        self._seen: set[str] = set()

    def __call__(self, function: str) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        if test != self._test:
            self._test = test
            self._seen.clear()
        if function not in self._seen:
            self._seen.add(function)
            # Opened anew each time: the process may be killed at any moment, or be a fork.
            with open(self._path, "a") as file:
                file.write(f"{test}\t{function}\n")


def install() -> None:
    """Puts the changed texts of the environment in front of the real ones."""
    if SOURCES in os.environ:
        sources = json.loads(Path(os.environ[SOURCES]).read_text())
        sys.meta_path.insert(0, _Finder(sources))
    if REACHED in os.environ:
        import builtins

        reached = _Reached(os.environ[REACHED])

        def note(function: str) -> None:
            reached(function)

        # torch.compile then calls it while it traces, instead of tracing into it.
        note._dynamo_marked_constant = True  # pyright: ignore
        builtins.__reached__ = note  # pyright: ignore


install()
