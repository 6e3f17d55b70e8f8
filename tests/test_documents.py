"""The code that people copy from the README and the documentation runs, and what it names
exists.
"""

import importlib
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

from benchmarks import execution, files, graft, rules
from benchmarks.edits import markdown, missed
from examples import rigl
from grapnet.cli.main import main
from grapnet.execution.manager import BACKENDS
from studies import run, split_fashion

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
RUN_HERE = (
    "optimizers",
    "sparse-training",
    "checkpoints",
    "continual-learning",
    "closed-form",
    "prune",
)
RUN_HERE += (
    "write-a-rule",
    "write-a-backend",
    "save-resume-undo",
    "deploy",
    "pictures",
    "command-line",
)
RUN_ELSEWHERE = (
    "rules",
    "convert",
    "compose",
    "transformers",
    "training-loops",
    "scikit-learn",
    "distributed",
)
PAGES = ["docs/concepts.md", "docs/execution.md", "docs/migration.md", "docs/comparison.md"]
DOCUMENTS = [
    "README.md",
    "studies/README.md",
    *PAGES,
    *(f"docs/guides/{name}.md" for name in RUN_HERE),
]
NEEDS_KERNELS = {"docs/execution.md": pytest.mark.sparse}
LISTED = (
    "grapnet._api",
    "grapnet.rules",
    "grapnet.continual",
    "grapnet.convert",
    "grapnet.plot",
)
INTEGRATIONS = ("sklearn", "transformers", "lightning", "networkx")
UNLISTED = {
    "continual",
    "rules",
    "cross_entropies",
    "squared_errors",
    "on_save_checkpoint",
    "on_load_checkpoint",
}


def python_blocks(text: str) -> list[str]:
    """Returns the Python code blocks of a Markdown text."""
    return [block for language, block in blocks_of(text) if language == "python"]


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Returns the blocks of a Markdown text that can be run, in order: Python, and commands of the
    shell.
    """
    return re.findall(r"^```(python|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run_command(line: str) -> None:
    """Runs a line such as `grapnet diff A B  # exit code 1`."""
    command, _, comment = line.partition("#")
    program, *arguments = shlex.split(command)
    assert program == "grapnet"
    assert main(arguments) == (int(comment.split()[-1]) if comment else 0), line


@pytest.fixture
def _own_backends():
    """Forgets the backends that a page registers."""
    known = dict(BACKENDS)
    yield
    BACKENDS.clear()
    BACKENDS.update(known)


@pytest.mark.usefixtures("_own_backends")
@pytest.mark.parametrize(
    "document",
    [pytest.param(name, marks=NEEDS_KERNELS.get(name, ())) for name in DOCUMENTS],
)
def test_code_blocks_run_in_order(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of((ROOT / document).read_text())
    assert blocks, f"{document} shows no code"
    names: dict[str, object] = {}
    for language, block in blocks:
        if language == "python":
            exec(compile(block, document, "exec"), names)
        else:
            for line in block.splitlines():
                run_command(line)


def test_every_guide_is_run_by_some_test_and_reachable_from_the_site():
    guides = {path.stem for path in (ROOT / "docs/guides").glob("*.md")}
    assert guides == {*RUN_HERE, *RUN_ELSEWHERE}
    tests = "\n".join(
        path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)
    )
    assert [name for name in RUN_ELSEWHERE if f"docs/guides/{name}.md" not in tests] == []
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if f": {page}\n" not in navigation] == []


def test_every_public_name_is_in_the_reference():
    reference = (ROOT / "docs/api.md").read_text()
    listed = {
        *re.findall(r"^        - (\w+)$", reference, flags=re.MULTILINE),
        *re.findall(r"`(\w+)`", reference),
    }
    missing = [f"{place}.{name}" for place, name in public_names() if name not in listed | UNLISTED]
    assert missing == []


def public_names() -> list[tuple[str, str]]:
    """Returns what packages re-export, and what the files of integrations define or name in
    `__all__`.
    """
    found = []
    for place in LISTED:
        source = Path(str(importlib.import_module(place).__file__)).read_text()
        names = re.findall(r"^from \.\S* import \w+ as ([A-Za-z]\w*)", source, flags=re.MULTILINE)
        assert names, f"{place} re-exports nothing"
        found += [(place, name) for name in names]
    for name in INTEGRATIONS:
        source = (ROOT / f"grapnet/integrations/{name}.py").read_text()
        defined = re.findall(
            r"^(?:class|def) ([A-Za-z]\w*)|^from \.\S* import (\w+) as \2$",
            source,
            flags=re.MULTILINE,
        )
        promised = re.findall(
            r'"(\w+)"', "".join(re.findall(r"^__all__ = .*", source, flags=re.MULTILINE))
        )
        found += [
            (f"grapnet.integrations.{name}", part)
            for parts in [*defined, promised]
            for part in parts
            if part
        ]
    return found


def test_names_on_the_walk_through_the_code_are_where_it_says():
    text = " ".join((ROOT / "docs/follow.md").read_text().split())
    named = re.findall(r"`([A-Za-z_.]+)` \(`([a-z_/]+\.py)`\)", text)
    assert len(named) > 50
    assert [entry for entry in named if not defines(*entry)] == []
    files = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text)
    assert [path for path in files if not (ROOT / "grapnet" / path).is_file()] == []
    # a name that is not there is noticed
    assert not defines("Execution.nothing", "execution/manager.py")


def defines(name: str, path: str) -> bool:
    """Says whether a file of the package defines every part of a dotted name."""
    source = (ROOT / "grapnet" / path).read_text()
    return all(
        re.search(rf"^\s*(?:class|def) {part}\b", source, flags=re.MULTILINE)
        for part in name.split(".")
    )


def test_pictures_and_files_named_in_the_documentation_exist():
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text()
        links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
        assert [link for link in links if not (page.parent / link).exists()] == [], page
        named = re.findall(r"`((?:benchmarks/)?results/\w[\w-]*\.json|tests/[\w/]+\.py)`", text)
        assert [path for path in named if not (ROOT / path).exists()] == [], page


def test_every_section_of_the_performance_page_has_its_command_and_its_file():
    text = (ROOT / "docs/performance.md").read_text()
    opening = text.split("\n## ")[0]
    for section in re.findall(r"^## (.*)$", text, flags=re.MULTILINE):
        row = next(line for line in opening.splitlines() if line.startswith(f"| [{section}]"))
        assert "command" in row or "`python -m " in row
        assert ".json`" in row


def test_quickstart_does_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(python_blocks((ROOT / "README.md").read_text())[0], names)
    net, gn = names["net"], names["gn"]
    assert [commit.reason for commit in net.history] == [
        "prune, and grow for task 1",
        "undo: prune, and grow for task 1",
    ]
    made = net.history[0].change.counts()
    assert (made["relations_removed"], made["nodes_added"]) == (round(49 * 48 / 10), 16)
    assert made["relations_added"] == 49 * 16 + 16 * 2
    assert net.count().relations == 49 * 48 + 48 * 10  # all of it is back as it was
    saved = gn.load(tmp_path / "net.safetensors")
    assert (saved.version, net.version) == (1, 2)
    assert len(saved.select(owner="task-1")) == 16
    saved.undo()
    assert saved.count().relations == net.count().relations


def test_the_table_of_edits_is_the_committed_measurement():
    result = json.loads((ROOT / "benchmarks/results/edits.json").read_text())
    for page in ("README.md", "docs/performance.md"):
        assert markdown(result) in (ROOT / page).read_text()
    huge = (
        f"{result['huge']['peak_gib']:.2f} GiB",
        f"{result['huge']['bytes_per_relation_at_rest']} bytes a relation",
    )
    assert all(
        part in " ".join((ROOT / "docs/performance.md").read_text().split()) for part in huge
    )
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


def test_the_guide_shows_the_committed_sizes_of_files():
    result = json.loads((RESULTS / "files.json").read_text())
    assert files.table(result) in (ROOT / "docs/guides/checkpoints.md").read_text()
    assert files.missed(result) == []


@pytest.mark.parametrize("name", ["graft", "graft-cuda"])
def test_the_performance_page_shows_the_committed_measurements_of_grafts(name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert graft.table(result) in (ROOT / "docs/performance.md").read_text()
    assert (
        max(max(row["output_error"], row["step_error"]) for row in result["rows"])
        < graft.LARGEST_ERROR
    )
    assert name != "graft" or graft.missed(result) == []


def test_the_readme_shows_the_committed_controls_of_split_fashion():
    result = json.loads((ROOT / "results/split_fashion.json").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())
    table = split_fashion.table(result)
    for shown in ("48.0 ± 1.8", "67.1 ± 2.1", "55.0 ± 2.7", "63.8 ± 1.9"):
        assert shown in readme
    for measured in ("48.02 ± 1.77", "67.13 ± 2.12", "54.96 ± 2.71", "63.77 ± 1.86"):
        assert measured in table  # what the README rounds
    assert "become -3.4 [-4.7, -2.1]" in table
    assert "become −3.4 [−4.7, −2.1]" in readme


def test_every_number_of_the_papers_claims_in_the_readme_was_measured_or_published():
    claims = (
        (ROOT / "README.md").read_text().split("`python -m studies.run` |\n")[1].split("\n\n")[0]
    )
    rows = [line for line in claims.splitlines() if not line.startswith("|---")]
    assert len(rows) > 8
    for row in rows:
        study = row.strip("|").split("|")[-1].strip(" `")
        result = json.loads((ROOT / f"results/{study}.json").read_text())
        page = run.markdown([run.report(study, ROOT / "results")]) + json.dumps(result["settings"])
        assert numbers(row.replace("MLP-256", "").replace("dense-256", "")) <= numbers(page), row


def test_the_readme_shows_the_committed_rows_of_the_closed_form():
    result = json.loads((ROOT / "results/closed_form.json").read_text())["summary"]
    table = (
        (ROOT / "README.md")
        .read_text()
        .split("seen-class |\n|---|---:|---:|\n")[1]
        .split("\n\n")[0]
    )
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
    command = f"python -m studies.run {study} --results results"
    found = [
        section
        for section in (ROOT / "docs/studies.md").read_text().split("\n## ")
        if command in section
    ]
    assert len(found) == 1, f"{len(found)} sections print {command}"
    return found[0]


def unsupported(section: str, tables_page: str, recorded: str) -> list[str]:
    """Returns the rows of a section that the tables do not have, and the numbers of its prose that
    stand nowhere.
    """
    section = re.sub(r"^```.*?^```", "", section, flags=re.MULTILINE | re.DOTALL)
    rows = [line for line in section.splitlines() if line.startswith("|")]
    prose = "\n".join(line for line in section.splitlines() if not line.startswith("|"))
    shown = set(tables_page.splitlines())
    return [row for row in rows if row not in shown] + sorted(
        numbers(prose) - numbers(tables_page + recorded)
    )


def numbers(text: str) -> set[str]:
    """Returns the numbers of a text without their signs; those of one digit count things and are
    left out.
    """
    return {
        found
        for found in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?", text)
        if len(found) > 1
    }


@pytest.mark.parametrize("study", run.STUDIES)
def test_the_page_of_studies_shows_the_committed_results(study):
    result = json.loads((ROOT / f"results/{study}.json").read_text())
    report = run.report(study, ROOT / "results")
    section = section_of(study)
    page = run.markdown([report])
    recorded = f" {json.dumps(result['settings'])} {result.get('seconds')} "
    assert unsupported(section, page, recorded) == []
    listed = re.findall(r"^- (.*)$", section, flags=re.MULTILINE)
    assert listed == report.missed  # every bar that was missed, and none that was reached


def test_the_page_and_the_readme_count_the_figures_that_came_out():
    overview = run.overview([run.report(name, ROOT / "results") for name in run.STUDIES])
    assert overview in (ROOT / "docs/studies.md").read_text()
    met = [tuple(map(int, found)) for found in re.findall(r"\| (\d+) of (\d+) \|", overview)]
    met, of = (sum(counts) for counts in zip(*met, strict=True))
    claims = " ".join((ROOT / "README.md").read_text().split())
    kinds = "with an interval, a deviation, as a count or as a rounding error"
    assert f"Of the {of} figures that it prints {kinds}, {met} came out" in claims


def test_a_number_that_was_not_measured_is_noticed():
    page = "| head | seen-class |\n|---|---:|\n| ours | 80.91 ± 0.25 |\n"
    assert unsupported("We measured 80.91 in 13.5 seconds.\n" + page, page, " 13.5 ") == []
    assert unsupported("We measured 80.92.", page, "") == ["80.92"]
    assert unsupported(page.replace("0.25", "0.24"), page, "") == ["| ours | 80.91 ± 0.24 |"]
