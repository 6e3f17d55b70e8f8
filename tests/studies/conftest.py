"""The fast run of the study that a test file is about, `test_<study>.py`, through its command."""

import importlib
import json

import pytest

from grapnet.studies.command import main


@pytest.fixture(scope="module")
def result(request, tmp_path_factory) -> dict:
    """The JSON of the fast form, which says of itself that it reaches no bar."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    path = tmp_path_factory.mktemp("study") / "result.json"
    study = importlib.import_module(f"grapnet.studies.{name}").STUDY
    assert main(study, ["--fast", "--check", "--processes", "1", "--json", str(path)]) == 1
    return json.loads(path.read_text())
