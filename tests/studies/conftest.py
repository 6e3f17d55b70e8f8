"""The fast run of the study that a test file is about, `test_<study>.py`, through its command."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from studies import run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests of a file here to one worker, so that a study runs once for all of them."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="module")
def result(request, tmp_path_factory) -> dict:
    """The JSON of the fast form, which reaches no bar because its settings are not a full run's."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    folder = tmp_path_factory.mktemp("study")
    assert run.main([name, "--fast", "--check", "--results", str(folder)]) == 1
    return json.loads((folder / f"{name}.json").read_text())


def set_at(tree: Any, place: Sequence[Any], value: Any) -> None:
    """Sets what lies in a tree at a place: the keys that lead to it."""
    for key in place[:-1]:
        tree = tree[key]
    tree[place[-1]] = value
