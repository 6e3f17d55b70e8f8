"""The mutants: which changes there are, and which tests are asked about one."""

from pathlib import Path

import pytest

from tools.mutants.__main__ import Mutant, by_function, draw, instrumented, select_tests
from tools.mutants.sites import OPERATORS, Site, is_mutant, sites_of


def changes(tmp_path: Path, source: str) -> list[tuple[str, str]]:
    """Returns the operator and the changed text of every mutant of a module."""
    path = tmp_path / "module.py"
    path.write_text(source)
    found = []
    for site in sites_of(path, tmp_path):
        if is_mutant(site, path.read_bytes()):
            found.append((site.operator, site.applied_to(path.read_bytes()).decode().strip()))
    return found


@pytest.mark.parametrize(
    ("source", "operator", "changed"),
    [
        ("x = a < b", "comparison", "x = a <= b"),
        ("x = a is None", "comparison", "x = a is not None"),
        ("x = a - b", "arithmetic", "x = ((a) + (b))"),
        ("x += y", "arithmetic", "x -= y"),
        ("x = a and b", "boolean", "x = ((a) or (b))"),
        ("x = not a", "boolean", "x = bool(a)"),
        ("x = 1 if a else b", "condition", "x = 1 if (not (a)) else b"),
        ("x = [a for a in b if a]", "condition", "x = [a for a in b if (not (a))]"),
        ("x = 3", "constant", "x = 4"),
        ("x = True", "constant", "x = False"),
        ("f(a, b=c)", "argument", "f(a)"),
        ("f(a)", "statement", "pass"),
        ("a.b = c", "statement", "pass"),
        ("raise Error", "statement", "pass"),
        ("def f():\n    return a", "return", "def f():\n    return None"),
        ("s = 'Σ'; x = 3", "constant", "s = 'Σ'; x = 4"),
    ],
)
def test_every_operator_changes_one_place(
    tmp_path: Path, source: str, operator: str, changed: str
) -> None:
    assert (operator, changed) in changes(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring with a 3."""',
        "x: int | None",
        "assert x > 3",
        "def __repr__(self):\n    return a + b",
        "if TYPE_CHECKING:\n    x = 3",
        "def f():\n    return None",
        "x = f'{a + b}'",
        "x = a",
    ],
)
def test_what_only_a_reader_sees_stays(tmp_path: Path, source: str) -> None:
    assert changes(tmp_path, source) == []


def test_the_same_seed_draws_the_same_mutants_of_every_operator() -> None:
    first = draw(5, 1)
    assert [mutant.key for mutant in first] == [mutant.key for mutant in draw(5, 1)]
    assert [mutant.key for mutant in first] != [mutant.key for mutant in draw(6, 1)]
    for area in ("core", "execution", "following", "checkpoint"):
        drawn = [mutant.site.operator for mutant in first if mutant.area == area]
        assert sorted(drawn) == sorted(OPERATORS)


def test_a_call_is_noted_as_the_first_statement_of_its_function() -> None:
    source = (
        b'class A:\n    def f(self):\n        """Doc."""\n        return 1\n\ndef g(): return 2\n'
    )
    text = instrumented(source, "a.py", {"a.py:A.f", "a.py:g"}).decode()
    assert text.splitlines()[3] == "        __reached__('a.py:A.f')"
    assert text.count("__reached__") == 1


def test_the_tests_that_enter_a_function_are_asked_quick_files_first() -> None:
    noted = [
        "t/test_slow.py::test_a (call)\tm.py:f",
        "t/test_quick.py::test_b (call)\tm.py:f",
        "t/test_shared.py::test_c (setup)\tm.py:f",
        "t/test_other.py::test_e (call)\tm.py:g",
    ]
    observed = {
        "always": [],
        "reached": by_function("\n".join(noted)),
        "seconds": {
            "t/test_slow.py::test_a": 9.0,
            "t/test_quick.py::test_b": 1.0,
            "t/test_shared.py::test_c": 1.0,
            "t/test_shared.py::test_d": 1.0,
            "t/test_other.py::test_e": 1.0,
        },
    }
    site = Site("constant", "m.py", 3, "f", 0, 1, "3", "4")
    # A fixture is made in the first test that needs it, for all tests of its file.
    assert select_tests(Mutant("core", site), observed) == [
        "t/test_quick.py::test_b",
        "t/test_shared.py::test_c",
        "t/test_shared.py::test_d",
        "t/test_slow.py::test_a",
    ]
    nowhere = Site("constant", "m.py", 3, "h", 0, 1, "3", "4")
    assert select_tests(Mutant("core", nowhere), observed) == []
