"""Every study of the package is registered, has its figures, its table and its test, and runs
fast.
"""

import importlib
import json
import pkgutil
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import grapnet.studies
from grapnet.studies import all as studies
from grapnet.studies import command, mlp_equivalence
from grapnet.studies.published import ARTEFACTS

HERE = Path(__file__).parent


def modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(grapnet.studies.__path__)]


def test_every_study_of_the_package_is_registered():
    found = {
        name
        for name in modules()
        if hasattr(importlib.import_module(f"grapnet.studies.{name}"), "STUDY")
    }
    assert found | {"tiny_transformer"} == set(studies.NAMES)
    assert len(studies.NAMES) == len(set(studies.NAMES)) == 12
    assert set(ARTEFACTS) == set(studies.NAMES)


@pytest.mark.parametrize("name", studies.NAMES)
def test_a_study_has_a_name_a_form_and_a_test_that_runs_its_fast_form(name):
    text = (HERE / f"test_{name}.py").read_text()
    # the fixture runs the fast form
    assert re.search(r"^def test_\w+\([^)]*\bresult\b", text, flags=re.MULTILINE)
    one = studies.registered(name)
    assert one.name == name
    # which asks what the paper does not
    assert bool(ARTEFACTS[name].figures) == (name != "closed_form_further")
    module = importlib.import_module(f"grapnet.studies.{name}")
    assert (one.table, one.missed) == (module.table, module.missed)
    assert re.fullmatch(r"[A-Z].{20,110}\.", one.about)
    assert (type(module.FAST), module.Settings() != module.FAST) == (module.Settings, True)
    if name != "tiny_transformer":
        study: command.Study = module.STUDY
        assert study.fast is module.FAST
        assert study.name == name  # of its JSON
        assert one.settings == json.loads(json.dumps(asdict(study.settings)))
        assert len(study.fast.seeds) <= 3


def test_the_studies_run_one_after_the_other_and_write_their_json(tmp_path, capsys):
    assert (
        studies.main(["--fast", "--results", str(tmp_path), "mlp_equivalence", "tiny_transformer"])
        == 0
    )
    captured = capsys.readouterr()
    written = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(written) == {"mlp_equivalence", "tiny_transformer"}
    for name, result in written.items():
        assert result["study"] == name
        assert f"## {name}\n\n{studies.registered(name).table(result)}" in captured.out
    assert [line.split(":")[0] for line in captured.err.splitlines() if line.endswith(" s")] == [
        "mlp_equivalence",
        "tiny_transformer",
        "all",
    ]


def test_an_interrupted_study_is_the_last_one(tmp_path, capsys, monkeypatch):
    def interrupted(settings: object, seed: int) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        mlp_equivalence, "STUDY", replace(mlp_equivalence.STUDY, one_seed=interrupted)
    )
    assert (
        studies.main(["--fast", "--results", str(tmp_path), "mlp_equivalence", "tiny_transformer"])
        == 130
    )
    assert "mlp_equivalence: interrupted after 0 of 2 seeds" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_between_two_studies_gives_one_line_too(capsys, monkeypatch):
    def interrupted(name: str) -> studies.Registered:
        raise KeyboardInterrupt

    monkeypatch.setattr(studies, "registered", interrupted)
    assert studies.main(["--fast", "tiny_transformer"]) == 130
    assert capsys.readouterr().err == "all: interrupted\n"


def test_an_unknown_study_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        studies.main(["--fast", "localisation"])
    assert "there is no study 'localisation'; there are localization, " in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no study 'localisation'"):
        studies.registered("localisation")
