"""The fast run of the study that a test file is about, `test_<study>.py`, through its command."""

import importlib
import json
from pathlib import Path

import pytest

from grapnet.studies.command import main


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests of a file here to one worker, so that a study runs once for all of them."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="module")
def result(request, tmp_path_factory) -> dict:
    """The JSON of the fast form, which says of itself that it reaches no bar."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    path = tmp_path_factory.mktemp("study") / "result.json"
    study = importlib.import_module(f"grapnet.studies.{name}").STUDY
    assert main(study, ["--fast", "--check", "--processes", "1", "--json", str(path)]) == 1
    return json.loads(path.read_text())
