"""The runner: seeds that are not computed twice, one JSON, and verdicts that can go either way."""

import copy
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from studies import mlp_equivalence, run
from studies.paper import Artefact, Figure, published
from studies.statistics import Paired, paired, summary

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "results"


@dataclass(frozen=True)
class Settings:
    """A study of nothing."""

    size: int = 5
    seeds: tuple[int, ...] = (7, 1, 4)


@pytest.fixture
def made_up(monkeypatch):
    """A study whose seeds are listed in `ran`, and interrupt the run where `stop` says so."""
    ran: list[int] = []

    def one_seed(settings: Settings, seed: int) -> dict:
        if seed == study.stop:
            raise KeyboardInterrupt
        ran.append(seed)
        return {"sum": settings.size * seed, "threads": torch.get_num_threads(), "pair": (seed, 0)}

    study = SimpleNamespace(
        Settings=Settings,
        FAST=Settings(size=2),
        one_seed=one_seed,
        summarise=lambda settings, seeds: {"sums": [row["sum"] for row in seeds.values()]},
        table=lambda result: f"sums {result['summary']['sums']}",
        missed=lambda result: [],
        ran=ran,
        stop=None,
    )
    monkeypatch.setitem(sys.modules, "studies.made_up", study)
    return study


def test_a_result_has_settings_versions_seconds_seeds_and_summary_as_json_holds_them(made_up):
    found = run.run("made_up", jobs=1)
    assert list(found) == ["study", "settings", "versions", "seconds", "summary", "seeds"]
    assert found["settings"] == {"size": 5, "seeds": [7, 1, 4]}
    assert found["summary"] == {"sums": [35, 5, 20]}
    assert list(found["seeds"]) == ["7", "1", "4"]
    assert found["seeds"]["1"] == {"sum": 5, "threads": 1, "pair": [1, 0]}
    assert found["versions"]["torch"] == torch.__version__


def test_finished_seeds_are_not_computed_again_after_an_interruption(made_up, tmp_path):
    made_up.stop = 4
    with pytest.raises(KeyboardInterrupt):
        run.run("made_up", jobs=1, cache=tmp_path)
    assert made_up.ran == [7, 1]
    made_up.stop = None
    whole = run.run("made_up", jobs=1, cache=tmp_path)
    assert made_up.ran == [7, 1, 4]
    assert whole["summary"] == {"sums": [35, 5, 20]}
    run.run("made_up", Settings(size=6), jobs=1, cache=tmp_path)
    assert made_up.ran == [7, 1, 4, 7, 1, 4]  # other settings are another run


def test_the_seeds_of_an_earlier_result_are_kept(made_up):
    earlier = run.run("made_up", Settings(seeds=(7, 4)), jobs=1)
    made_up.ran.clear()
    found = run.run("made_up", jobs=1, earlier=earlier)
    assert made_up.ran == [1]
    assert list(found["seeds"]) == ["7", "1", "4"]
    assert found["summary"] == {"sums": [35, 5, 20]}
    assert found["seconds"] >= earlier["seconds"]
    for other in ({"settings": {**earlier["settings"], "size": 6}}, {"versions": {"torch": "0"}}):
        with pytest.raises(ValueError, match=r"size|torch"):
            run.run("made_up", jobs=1, earlier=earlier | other)
    assert made_up.ran == [1]


def staged(part_numbers) -> SimpleNamespace:
    """Returns a study of two stages whose parts are computed by a function."""
    return SimpleNamespace(
        Settings=Settings,
        FAST=Settings(size=2),
        stages=lambda settings: [["first", "other"], ["last"]],
        one_part=part_numbers,
        summarise=lambda settings, seeds: {"last": [row["last"] for row in seeds.values()]},
    )


def test_parts_know_the_earlier_stages_of_their_seed_and_are_not_computed_again(
    monkeypatch, tmp_path
):
    ran = []

    def one_part(settings: Settings, seed: int, part: str, found: dict) -> int:
        if (seed, part) == interrupted:
            raise KeyboardInterrupt
        ran.append((seed, part))
        assert settings.seeds == (seed,)
        assert sorted(found) == ([] if part != "last" else ["first", "other"])
        return 10 * seed + sum(found.values())

    monkeypatch.setitem(sys.modules, "studies.made_up", staged(one_part))
    interrupted = (4, "other")
    with pytest.raises(KeyboardInterrupt):
        run.run("made_up", jobs=1, cache=tmp_path)
    assert ran == [(7, "first"), (7, "other"), (1, "first"), (1, "other"), (4, "first")]
    interrupted = None
    ran.clear()
    # Fewer seeds first: all seeds then find what these have computed.
    fewer = run.run("made_up", Settings(seeds=(7, 1)), jobs=1, cache=tmp_path)
    assert fewer["seeds"]["1"] == {"first": 10, "other": 10, "last": 30}
    assert ran == [(7, "last"), (1, "last")]
    ran.clear()
    whole = run.run("made_up", jobs=1, cache=tmp_path)
    assert ran == [(4, "other"), (4, "last")]
    assert whole["summary"] == {"last": [210, 30, 120]}


def test_processes_give_the_numbers_of_one_process():
    one = run.run("mlp_equivalence", mlp_equivalence.FAST, jobs=1)
    two = run.run("mlp_equivalence", mlp_equivalence.FAST, jobs=2)
    assert one["seeds"] == two["seeds"]
    assert one["summary"] == two["summary"]


def test_the_command_writes_json_prints_tables_and_ends_on_ctrl_c(
    made_up, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(run, "STUDIES", ("made_up",))
    monkeypatch.setattr(run, "published", lambda name: Artefact("Made up", "Nothing.", {}))
    monkeypatch.chdir(tmp_path)
    assert run.main(["--jobs", "1", "--results", "out", "--markdown", "out/t.md", "--check"]) == 0
    written = json.loads(Path("out/made_up.json").read_text())
    assert written["study"] == "made_up"
    assert "sums [35, 5, 20]" in capsys.readouterr().out
    assert "sums [35, 5, 20]" in Path("out/t.md").read_text()
    # Fewer seeds, or a fast run, reach no bar.
    assert run.main(["--jobs", "1", "--seeds", "2", "--check"]) == 1
    assert "seeds [7, 1] instead of [7, 1, 4]" in capsys.readouterr().err
    assert run.main(["--fast", "--check"]) == 1
    made_up.stop = 7
    assert run.main(["--fast"]) == run.INTERRUPTED


@pytest.mark.parametrize("name", [*run.STUDIES, *run.FURTHER])
def test_a_study_has_a_form_and_a_test_that_runs_its_fast_form(name):
    text = (HERE / f"test_{name}.py").read_text()
    assert re.search(r"^def test_\w+\([^)]*\bresult\b", text, flags=re.MULTILINE)
    module = run.study(name)
    assert (type(module.FAST), module.Settings() != module.FAST) == (module.Settings, True)
    assert len(getattr(module.FAST, "seeds", ())) <= 3
    # Some ask what the paper does not.
    assert bool(published(name).figures) == (name not in ("closed_form_further", *run.FURTHER))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_have_every_figure_and_the_settings_of_a_full_run(path):
    if path.stem in (*run.STUDIES, *run.FURTHER):
        found = run.report(path.stem, RESULTS)
        if path.stem in run.FURTHER:
            # They train on a GPU, for hours: the first seeds are committed before the others.
            result = json.loads(path.read_text())
            full = run._as_read(asdict(run.study(path.stem).Settings()))
            first = full["seeds"][: len(result["seeds"])]
            assert len(first) >= 3
            assert run.differences(full | {"seeds": first}, result["settings"]) == []
        else:
            assert found.problems == []
        assert len(found.rows) == len(published(path.stem).figures)
    else:
        others = {
            "matrix",
            "rigl_fashion",
            "rigl_fashion_98",
            "rigl_fashion_99",
            "rigl_fashion_tiles",
            "soak",
            "soak-spaces",
        }
        assert path.stem in others  # which are no studies


def numbers(found: object) -> list:
    """Returns what lies at the ends of a tree, in order."""
    if isinstance(found, dict):
        return [leaf for key in sorted(found) for leaf in (key, *numbers(found[key]))]
    if isinstance(found, list):
        return [leaf for item in found for leaf in numbers(item)]
    return [found]


@pytest.mark.parametrize(
    "name", [name for name in run.recorded(RESULTS) if name != "tiny_transformer"]
)
def test_the_committed_summary_is_that_of_the_committed_seeds(name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    module = run.study(name)
    again = json.loads(json.dumps(module.summarise(module.Settings(), result["seeds"])))
    for ours, committed in zip(numbers(again), numbers(result["summary"]), strict=True):
        assert ours == (
            pytest.approx(committed, rel=1e-9) if isinstance(committed, float) else committed
        )


def test_check_names_what_is_missing_missed_or_made_otherwise(tmp_path, capsys):
    for name in ("tiny_transformer", "mlp_equivalence"):
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    names = ["mlp_equivalence", "tiny_transformer"]
    assert run.main([*names, "--read", str(tmp_path), "--check"]) == 0
    assert run.main(["sifter", "--read", str(tmp_path), "--check"]) == 1
    assert "sifter.json is missing" in capsys.readouterr().err
    tiny = json.loads((tmp_path / "tiny_transformer.json").read_text())
    tiny["cut"]["left"]["gradient"] = 1024
    tiny["settings"]["epochs"] = 2
    (tmp_path / "tiny_transformer.json").write_text(json.dumps(tiny))
    assert run.main([*names, "--read", str(tmp_path), "--check"]) == 1
    captured = capsys.readouterr()
    assert "MISSED tiny_transformer: gradient holds 1024 relations of 992" in captured.err
    assert "epochs 2 instead of 12" in captured.err
    assert "- **MISSED** gradient holds 1024" in captured.out
    assert run.main([*names, "--read", str(tmp_path)]) == 0  # without --check nothing is asked


def test_reading_a_folder_judges_every_study_that_has_a_result_there(tmp_path, capsys):
    result = json.loads((RESULTS / "heads_and_layers.json").read_text())
    (tmp_path / "heads_and_layers.json").write_text(json.dumps(result))
    assert run.main(["--read", str(tmp_path), "--check"]) == 1
    errors = capsys.readouterr().err
    for line in run.study("heads_and_layers").missed(result):
        assert f"MISSED heads_and_layers: {line}" in errors
    assert "MISSED localization" in errors  # of the paper, and without a result
    assert "MISSED growth" not in errors


def seeds_with(name: str, values: list) -> tuple[Figure, list[dict]]:
    """Returns a figure of localization, and seeds that hold these values there."""
    figure = published("localization").figures[name]
    result = json.loads((RESULTS / "localization.json").read_text())
    one = next(iter(result["seeds"].values()))
    seeds = []
    for value in values:
        numbers = copy.deepcopy(one)
        inner = numbers
        *way, last = figure.ours.split("/")
        for key in way:
            inner = inner[key]
        inner[last] = value
        seeds.append(numbers)
    return figure, seeds


@pytest.mark.parametrize(
    ("mean", "agrees"),
    [(98.26, True), (98.01, True), (98.51, True), (97.99, False), (98.53, False), (50.0, False)],
)
def test_a_mean_passes_within_the_published_interval_only(mean, agrees):
    values = [[mean + 0.1 * (-1) ** n] * 5 for n in range(10)]
    row = run.judged(*seeds_with("base pair accuracy", values))
    assert row.agrees is agrees
    assert row.ours == pytest.approx(mean)


@pytest.mark.parametrize(("cuts", "agrees"), [(96, True), (95, False)])
def test_counts_pass_when_they_are_the_same_for_every_seed(cuts, agrees):
    values = [[[96] * 3] * 5, [[cuts] * 3] * 5]
    assert run.judged(*seeds_with("relations cut for a task", values)).agrees is agrees
    with pytest.raises(ValueError, match="not one number"):
        run.judged(*seeds_with("relations cut for a task", [[[96, 95, 97]] * 5]))


@pytest.mark.parametrize(
    ("difference", "agrees"), [(1.19e-7, True), (0.0, True), (1.3e-7, False), (2.0, False)]
)
def test_rounding_errors_pass_up_to_the_papers(difference, agrees):
    (figure,) = published("mlp_equivalence").figures.values()
    found = {"ReLU": {"reference": {"values": difference}}, "GELU": {"reference": {"values": 0.0}}}
    row = run.judged(figure, [{"float32": found}])
    assert (row.ours, row.agrees) == (difference, agrees)


def test_where_the_data_lay_does_not_matter_but_other_settings_do():
    wanted = {"features": "here", "seeds": [1, 2]}
    assert run.differences(wanted, {**wanted, "features": "elsewhere"}) == []
    assert run.differences(wanted, {**wanted, "features": "made-up"}) != []
    assert run.differences(wanted, {**wanted, "more": True}) == ["more True instead of nothing"]
    assert asdict(run.study("split_cifar").Settings())["features"] == ""


def test_a_paired_comparison_uses_the_pairs():
    draw = np.random.default_rng(5)
    a = draw.normal(63, 3, 5).tolist()
    b = draw.normal(60, 2, 5).tolist()
    found = paired(a, b)
    differences = np.subtract(a, b)
    reach = stats.t.ppf(0.975, 4) * differences.std(ddof=1) / 5**0.5
    expected = (differences.mean() - reach, differences.mean() + reach)
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert paired([3.0, 4.0, 5.0], [1.0, 2.0, 3.0]) == Paired(2.0, 0.0, 2.0, 2.0, 0.0, 3)
    assert paired([3.0, 4.0], [3.0, 4.0]) == Paired(0.0, 0.0, 0.0, 0.0, 1.0, 2)
    assert summary(a, population=True)[:2] == pytest.approx((np.mean(a), np.std(a)))
