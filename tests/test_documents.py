"""The code that people copy from the README and the documentation runs."""

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks import execution, graft, rules
from benchmarks.edits import markdown, missed
from examples import rigl
from grapnet.studies import all as studies
from grapnet.studies import split_fashion, tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
NAMES = ("optimizers", "sparse-training", "checkpoints", "continual-learning", "closed-form", "data")
GUIDES = [f"docs/guides/{name}.md" for name in NAMES]  # the others are run by tests of their own
DOCUMENTS = ["README.md", "docs/concepts.md", "docs/execution.md", *GUIDES]


def python_blocks(text: str) -> list[str]:
    """Returns the Python code blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_blocks_run_in_order(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks((ROOT / document).read_text())
    assert blocks, f"{document} shows no code"
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, document, "exec"), names)


def test_quickstart_does_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(python_blocks((ROOT / "README.md").read_text())[0], names)
    net, gn = names["net"], names["gn"]
    assert [commit.reason for commit in net.history] == [
        "prune the weakest tenth",
        "grow for task 1",
        "keep task 1 as it is",
        "undo: keep task 1 as it is",
    ]
    first = 49 * 48 - round(49 * 48 / 10) + 49 * 16
    assert net.count().relations == first + 48 * 10 + 16 * 2
    assert net.count().frozen == 0
    saved = gn.load(tmp_path / "net.safetensors")
    assert saved.version == net.version == 4


def test_the_table_of_edits_is_the_committed_measurement():
    result = json.loads((ROOT / "benchmarks/results/edits.json").read_text())
    assert markdown(result) in (ROOT / "README.md").read_text()
    assert missed(result) == []


def test_the_last_soak_ran_enough_programs_without_failure():
    report = json.loads((ROOT / "results/soak.json").read_text())
    assert report["programs"] >= 10_000
    assert report["failures"] == 0


def test_files_named_in_the_readme_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", ["execution", "execution-cuda"])
def test_the_performance_page_shows_the_committed_measurements(name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert not result["settings"]["fast"]
    assert execution.markdown(result) in (ROOT / "docs/performance.md").read_text()


def test_the_guide_shows_the_committed_runs_of_rigl():
    result = json.loads((ROOT / "results/rigl_fashion.json").read_text())
    assert rigl.table(result) in (ROOT / "docs/guides/sparse-training.md").read_text()
    mean = {method: statistics.mean(found) for method, found in result["accuracy"].items()}
    assert len(result["accuracy"]["RigL"]) == 5
    assert mean["dense"] - 1 < mean["RigL"]
    assert mean["RigL"] > mean["static"]
    assert result["times_as_fast_as_dense"]["RigL"] > 1


def test_the_performance_page_shows_the_committed_costs_of_rules():
    result = json.loads((RESULTS / "rules.json").read_text())
    assert rules.markdown(result) in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize("name", ["graft", "graft-cuda"])
def test_the_performance_page_shows_the_committed_measurements_of_grafts(name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert graft.table(result) in (ROOT / "docs/performance.md").read_text()
    assert max(max(row["output_error"], row["step_error"]) for row in result["rows"]) < graft.LARGEST_ERROR
    assert name != "graft" or graft.missed(result) == []


def test_the_readme_shows_the_committed_controls_of_split_fashion():
    result = json.loads((ROOT / "results/split_fashion.json").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())
    table = split_fashion.STUDY.table(result)
    for shown in ("48.0 ± 1.8", "67.1 ± 2.1", "55.0 ± 2.7", "63.8 ± 1.9"):
        assert shown in readme
    for measured in ("48.02 ± 1.77", "67.13 ± 2.12", "54.96 ± 2.71", "63.77 ± 1.86"):
        assert measured in table  # what the README rounds
    assert "become -3.4 [-4.7, -2.1]" in table
    assert "become −3.4 [−4.7, −2.1]" in readme


def test_the_readme_shows_the_committed_rows_of_the_closed_form():
    result = json.loads((ROOT / "results/closed_form.json").read_text())["summary"]
    table = (ROOT / "README.md").read_text().split("seen-class |\n|---|---:|---:|\n")[1].split("\n\n")[0]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    few, full = result["few"], result["full"]
    replay = "logit-adjusted ER, {} nodes, {}"
    measured = [
        few["closed form, 210 softplus nodes, float32 sums"],
        few[replay.format(210, "500 images")],
        full["closed form, 1000 silu nodes, float32 sums"],
        full[replay.format(1000, "500 images")],
        full[replay.format(1000, "as many bytes as the closed form")],
        full["offline joint training, 1000 silu nodes"],
    ]
    for (_, stored, accuracy), row in zip(shown, measured, strict=True):
        assert accuracy == f"{row['seen_class']['mean']:.1f}"
        assert stored == "everything" or f"{row['bytes']:,} bytes" in stored


def section_of(study: str) -> str:
    """Returns the section of docs/studies.md that prints the command of a study."""
    command = f"python -m grapnet.studies.{study} --json results/{study}.json"
    found = [section for section in (ROOT / "docs/studies.md").read_text().split("\n## ") if command in section]
    assert len(found) == 1, f"{len(found)} sections print {command}"
    return found[0]


def unsupported(section: str, tables_page: str, recorded: str) -> list[str]:
    """Returns the rows of a section that the tables do not have, and the numbers of its prose that stand nowhere."""
    section = re.sub(r"^```.*?^```", "", section, flags=re.MULTILINE | re.DOTALL)
    rows = [line for line in section.splitlines() if line.startswith("|")]
    prose = "\n".join(line for line in section.splitlines() if not line.startswith("|"))
    shown = set(tables_page.splitlines())
    return [row for row in rows if row not in shown] + sorted(numbers(prose) - numbers(tables_page + recorded))


def numbers(text: str) -> set[str]:
    """Returns the numbers of a text without their signs; those of one digit count things and are left out."""
    return {found for found in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?", text) if len(found) > 1}


@pytest.mark.parametrize("study", studies.NAMES)
def test_the_page_of_studies_shows_the_committed_results(study):
    result = json.loads((ROOT / f"results/{study}.json").read_text())
    report, section = tables.report(study, ROOT / "results"), section_of(study)
    page, recorded = tables.markdown([report]), f" {json.dumps(result['settings'])} {result.get('seconds')} "
    assert unsupported(section, page, recorded) == []
    listed = re.findall(r"^- (.*)$", section, flags=re.MULTILINE)
    assert listed == report.missed  # every bar that was missed, and none that was reached


def test_a_number_that_was_not_measured_is_noticed():
    page = "| head | seen-class |\n|---|---:|\n| ours | 80.91 ± 0.25 |\n"
    assert unsupported("We measured 80.91 in 13.5 seconds.\n" + page, page, " 13.5 ") == []
    assert unsupported("We measured 80.92.", page, "") == ["80.92"]
    assert unsupported(page.replace("0.25", "0.24"), page, "") == ["| ours | 80.91 ± 0.24 |"]
