"""The code that people copy from the README and the documentation runs, and what it names
exists.
"""

import importlib
import json
import re
import shlex
import statistics
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from benchmarks import capture, execution, files, graft, repair, rules
from benchmarks.edits import markdown, missed
from examples import rigl
from grapnet.cli._main import commands, main
from grapnet.execution._manager import BACKENDS
from studies import one_shot, one_shot_gpt, run, sifter_shares

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
RUN_ELSEWHERE = ("rules", "distributed")  # guides
DOCUMENTS = ["README.md", "studies/README.md"]
DOCUMENTS += [f"docs/{name}.md" for name in ("concepts", "execution", "migration", "comparison")]
for guide in sorted((ROOT / "docs/guides").glob("*.md")):
    if guide.stem not in RUN_ELSEWHERE:
        DOCUMENTS.append(f"docs/guides/{guide.name}")
# torch and Lightning warn about themselves.
LEAF = pytest.mark.filterwarnings(r"ignore:`isinstance.treespec, LeafSpec.` is deprecated")
MARKS = {
    "docs/execution.md": [pytest.mark.sparse],
    "docs/guides/compose.md": [pytest.mark.xdist_group("export"), LEAF],
    "docs/guides/prune-while-training.md": [pytest.mark.xdist_group("export"), LEAF],
    "docs/guides/transformers.md": [pytest.mark.xdist_group("transformers")],
    "docs/guides/training-loops.md": [
        pytest.mark.xdist_group("lightning"),
        LEAF,
        pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
        pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    ],
}
LISTED = (
    "grapnet._api",
    "grapnet.checkpoint",
    "grapnet.continual",
    "grapnet.convert",
    "grapnet.errors",
    "grapnet.execution",
    "grapnet.following",
    "grapnet.plot",
    "grapnet.spaces",
)
INTEGRATIONS = ("sklearn", "lightning", "transformers", "networkx")
UNLISTED = {
    "continual",
    "errors",
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
    [pytest.param(name, marks=MARKS.get(name, ())) for name in DOCUMENTS],
)
def test_code_blocks_run_in_order(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of((ROOT / document).read_text())
    assert blocks, f"{document} shows no code"
    names: dict[str, object] = {"__name__": "document"}
    for language, block in blocks:
        if language == "python":
            exec(compile(block, document, "exec"), names)
        else:
            for line in block.splitlines():
                run_command(line)


def test_every_guide_is_run_by_some_test_and_reachable_from_the_site():
    tests = "\n".join(
        path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)
    )
    assert [name for name in RUN_ELSEWHERE if f"docs/guides/{name}.md" not in tests] == []
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if f": {page}\n" not in navigation] == []


def test_every_public_name_is_in_the_reference():
    listed = listed_names()
    missing = []
    for place, name in public_names():
        # What `import grapnet` offers as well is listed there.
        if name not in listed.get(place, set()) | listed["grapnet"] | UNLISTED:
            missing.append(f"{place}.{name}")
    assert missing == []


def test_every_rule_backend_and_command_is_in_its_document():
    public = [getattr(gn.rules, name) for name in gn.rules.__all__]
    documented = {
        "guides/rules": [
            kind.__name__ for kind in public if is_dataclass(kind) and "__call__" in vars(kind)
        ],
        "execution": list(BACKENDS),
        "guides/command-line": list(commands()),
    }
    for page, names in documented.items():
        text = (ROOT / f"docs/{page}.md").read_text()
        assert names
        # as code or a string, followed by settings or not
        assert [name for name in names if not re.search(rf"[`\"]{name}\b", text)] == [], page


def listed_names() -> dict[str, set[str]]:
    """Returns the names that the reference lists, by their modules."""
    found = {}
    for section in (ROOT / "docs/api.md").read_text().split("\n::: ")[1:]:
        place = section.split("\n")[0]
        found[place] = {*re.findall(r"^        - (\w+)$", section, flags=re.MULTILINE)}
    return found


def public_names() -> list[tuple[str, str]]:
    """Returns what packages re-export, and what the files of integrations define or name in
    `__all__`.
    """
    found = []
    for place in LISTED:
        source = Path(str(importlib.import_module(place).__file__)).read_text()
        names = re.findall(r"^from \S+ import \w+ as ([A-Za-z]\w*)", source, flags=re.MULTILINE)
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
    assert len(named) > 40
    assert [entry for entry in named if not defines(*entry)] == []
    files = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text)
    assert [path for path in files if not (ROOT / "grapnet" / path).is_file()] == []
    # a name that is not there is noticed
    assert not defines("Execution.nothing", "execution/_manager.py")


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
        require_files(text)


def test_files_named_for_contributors_exist():
    require_files((ROOT / "CONTRIBUTING.md").read_text())
    with pytest.raises(AssertionError):
        require_files("`grapnet/core/_nothing.py`")


def require_files(text: str) -> None:
    """Checks that results, tests and files of the package that a text names exist."""
    named = re.findall(r"`((?:benchmarks/)?results/\w[\w-]*\.json)`", text)
    named += re.findall(r"`((?:tests|grapnet)/[\w/]+(?:\.py|/))`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


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
    net = names["net"]
    gn = names["gn"]
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
    assert markdown(result) in (ROOT / "docs/performance.md").read_text()
    huge = (
        f"{result['huge']['peak_gib']:.2f} GiB",
        f"{result['huge']['bytes_per_relation_at_rest']} bytes per relation",
    )
    assert all(
        part in " ".join((ROOT / "docs/performance.md").read_text().split()) for part in huge
    )
    assert missed(result) == []


def test_the_tables_of_edits_and_of_captured_steps_on_cuda_are_committed_measurements():
    text = (ROOT / "docs/performance.md").read_text()
    edits = json.loads((RESULTS / "edits-cuda.json").read_text())
    assert markdown(edits) in text
    assert missed(edits) == []
    assert capture.table(json.loads((RESULTS / "capture-cuda.json").read_text())) in text


@pytest.mark.parametrize("name", ["soak", "soak-spaces"])
def test_the_last_soak_ran_enough_programs_without_failure(name):
    report = json.loads((ROOT / f"results/{name}.json").read_text())
    assert report["programs"] >= 10_000
    assert report["failures"] == 0


def test_the_last_matrix_had_all_models_and_no_failure():
    report = json.loads((ROOT / "results/matrix.json").read_text())
    assert report["models"] == report["of_models"] >= 77
    assert report["failures"] == 0


def test_the_last_run_of_the_files_of_torch_pruning_passed():
    report = json.loads((ROOT / "tools/results/torch_pruning_tests.json").read_text())
    assert len(report["files"]) == 31
    assert all(one["passed"] for one in report["files"])


def test_files_named_in_the_readme_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", ["execution", "execution-cuda"])
def test_the_performance_page_shows_the_committed_measurements(name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert not result["settings"]["fast"]
    assert execution.markdown(result) in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize("name", ["rigl_fashion_98", "rigl_fashion_99"])
def test_the_guide_shows_the_committed_runs_of_rigl_at_higher_sparsities(name):
    result = json.loads((ROOT / f"results/{name}.json").read_text())
    assert result["settings"]["density"] == round(1 - int(name[-2:]) / 100, 2)
    assert {*rigl.CONTRASTS[0], *rigl.CONTRASTS[1], rigl.LONGER} == set(result["accuracy"])
    assert rigl.table(result) in (ROOT / "docs/guides/sparse-training.md").read_text()


def test_the_guide_shows_the_committed_runs_of_rigl():
    result = json.loads((ROOT / "results/rigl_fashion.json").read_text())
    assert rigl.table(result) in (ROOT / "docs/guides/sparse-training.md").read_text()
    mean = {method: statistics.mean(found) for method, found in result["accuracy"].items()}
    assert len(result["accuracy"]["RigL"]) == 5
    assert mean["dense"] - 1 < mean["RigL"]
    assert mean["RigL"] > mean["static"]
    assert result["times_as_fast_as_dense"]["RigL"] > 1


def test_the_guide_shows_that_tiles_are_not_below_single_relations():
    result = json.loads((ROOT / "results/rigl_fashion_tiles.json").read_text())
    assert rigl.table(result) in (ROOT / "docs/guides/sparse-training.md").read_text()
    tiles = result["accuracy"]["RigL tiles"]
    assert len(tiles) == 5
    assert statistics.mean(tiles) > statistics.mean(result["accuracy"]["RigL"]) - 0.7


def test_the_performance_page_shows_the_committed_costs_of_repair():
    result = json.loads((RESULTS / "repair.json").read_text())
    assert repair.table(result) in (ROOT / "docs/performance.md").read_text()


def test_the_guide_shows_the_committed_curves_of_cuts():
    result = json.loads((ROOT / "results/sifter_shares.json").read_text())
    curves = sifter_shares.curves(result, "Wine")
    assert curves in (ROOT / "docs/guides/prune.md").read_text()


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


PUBLISHED_PRUNING = "tools/results/published_pruning.json"

COMMITTED = run.recorded(ROOT / "results")


@pytest.mark.parametrize("study", COMMITTED)
def test_the_page_of_studies_shows_the_committed_results(study):
    result = json.loads((ROOT / f"results/{study}.json").read_text())
    report = run.report(study, ROOT / "results")
    section = section_of(study)
    page = run.markdown([report])
    recorded = f" {json.dumps(result['settings'])} {result.get('seconds')} "
    if study == "one_shot_gpt":
        # The section also tells of the model that the comparison with published code is of.
        compared = json.loads((ROOT / PUBLISHED_PRUNING).read_text())
        recorded += f"{compared['settings']['training']['steps']} {compared['dense']:.3f} "
    assert unsupported(section, page, recorded) == []
    listed = re.findall(r"^- (.*)$", section, flags=re.MULTILINE)
    assert listed == report.missed  # every bar that was missed, and none that was reached


def test_the_guide_to_one_shot_shows_the_committed_accuracies():
    result = json.loads((ROOT / "results/one_shot.json").read_text())
    guide = (ROOT / "docs/guides/one-shot.md").read_text()
    *before_training, _ = one_shot.table(result).split("\n\n")
    assert [part for part in before_training if part not in guide] == []


def test_the_page_of_studies_counts_the_figures_that_came_out():
    overview = run.overview([run.report(name, ROOT / "results") for name in COMMITTED])
    assert overview in (ROOT / "docs/studies.md").read_text()


def test_every_number_of_the_readme_was_measured():
    """Compares the numbers under "Three things" with the files that hold them."""
    text = (ROOT / "README.md").read_text()
    shown = numbers(text.split("## Three things")[1].split("\n## ")[0])
    grafted = json.loads((RESULTS / "graft.json").read_text())["rows"]
    speed = next(
        row["times_faster"]
        for row in grafted
        if row["cut"] == 0.9 and row["block"] == "transformers GPT2MLP"
    )
    optimizers = json.loads((ROOT / "tools/results/optimizers.json").read_text())
    counts = optimizers["counts of torch"]
    interrupts = json.loads((ROOT / "tools/results/interrupts.json").read_text())
    assert interrupts["failures"] == []
    assert shown == {
        "90",
        f"{speed:.2f}",
        str(sum(counts.values())),
        str(counts["follows"]),
        str(counts["refused"]),
        f"{interrupts['injections']:,}",
    }


def promises(text: str) -> list[tuple[str, str, str]]:
    """Returns the rows of the tables of promises: promise, command and file of the last run."""
    rows = []
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| promise")):
            promise, command, last_run = (cell.strip(" `") for cell in line.strip("|").split("|"))
            rows.append((promise, command, last_run))
    return rows


def can_run(command: str) -> bool:
    """Checks that the tests, the module or the target of a command exists."""
    program, *arguments = shlex.split(command)
    if program == "pytest":
        return all((ROOT / path).exists() for path in arguments)
    if program == "make":
        return f"\n{arguments[0]}: " in (ROOT / "Makefile").read_text()
    return program == "python" and (ROOT / f"{arguments[1].replace('.', '/')}.py").is_file()


def test_every_promise_has_a_command_that_exists():
    rows = promises((ROOT / "docs/promises.md").read_text())
    assert len(rows) >= 18
    assert [command for _, command, _ in rows if not can_run(command)] == []
    assert [path for _, _, path in rows if not (ROOT / path).exists()] == []
    assert not can_run("pytest tests/core/test_nothing.py")
    assert not can_run("make nothing")


def test_the_command_of_the_comparison_with_published_pruning_has_the_settings_of_its_file():
    recorded = json.loads((ROOT / PUBLISHED_PRUNING).read_text())
    rows = promises((ROOT / "docs/promises.md").read_text())
    (command,) = [command for _, command, path in rows if path == PUBLISHED_PRUNING]
    steps = re.search(r"--steps (\d+)", command)
    assert steps is not None
    settings = one_shot_gpt.Settings(training=one_shot_gpt.Training(steps=int(steps[1])))
    assert json.loads(json.dumps(asdict(settings))) == recorded["settings"]
    own = command.replace("FILE", PUBLISHED_PRUNING)
    assert own in (ROOT / "studies/README.md").read_text()


def test_a_number_that_was_not_measured_is_noticed():
    page = "| head | seen-class |\n|---|---:|\n| ours | 80.91 ± 0.25 |\n"
    assert unsupported("We measured 80.91 in 13.5 seconds.\n" + page, page, " 13.5 ") == []
    assert unsupported("We measured 80.92.", page, "") == ["80.92"]
    assert unsupported(page.replace("0.25", "0.24"), page, "") == ["| ours | 80.91 ± 0.24 |"]


def test_the_first_pages_stay_short() -> None:
    assert 100 < len((ROOT / "README.md").read_text().split()) <= 900
    assert 20 < len((ROOT / "docs/follow.md").read_text().splitlines()) <= 70


NET = gn.GrapNet([3, 2])
ADOPTED = gn.adopt(nn.Linear(3, 2), torch.zeros(1, 3))
OBJECTS: dict[str, Any] = {
    "net": NET,
    "net.layers[0]": NET.layers[0],
    "net.transitions[0]": NET.transitions[0],
    "net.edit()": NET.edit(),
    "net.execution": NET.execution,
    "net.journal": NET.journal,
    "adopted": ADOPTED,
    "adopted.spaces[0]": ADOPTED.spaces[0],
    "adopted.edit()": ADOPTED.edit(),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_names_of_an_object_are_those_of_the_reference(name: str) -> None:
    plain = {*dir(nn.Module()), *dir(object())}
    shown = [one for one in dir(OBJECTS[name]) if not one.startswith("_") and one not in plain]
    row = rf"^\| `{re.escape(name)}` \| (.*) \|$"
    (members,) = re.findall(row, (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE)
    assert sorted(shown) == re.findall(r"`(\w+)`", members)
