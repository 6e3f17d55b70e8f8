"""Every counter finds what it counts in a made-up source text, and leaves the rest alone."""

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import signs


@pytest.fixture
def package(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes the files of a package called `pack` and returns its folder."""

    def write(files: dict[str, str]) -> Path:
        folder = tmp_path / "pack"
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return write


SOURCE = '''"""One line."""

# alone
TEXT = """
# in a string

"""  # beside code


def f():
    """Two

    paragraphs."""
    # indented
    return 1
'''


def test_lines_of_code_are_not_blank_not_comments_and_not_docstrings() -> None:
    counts = signs.count_lines(SOURCE, ast.parse(SOURCE))
    assert counts["lines"] == 15
    assert counts["own_line_comments"] == 2
    code = ['TEXT = """', "# in a string", '"""  # beside code', "def f():", "    return 1"]
    assert counts["code_lines"] == len(code)
    assert counts["code_characters"] == len("".join(code))


@pytest.mark.parametrize(("width", "long"), [(100, 0), (101, 1)])
def test_long_lines_have_more_than_100_columns(width: int, long: int) -> None:
    text = "x = '".ljust(width - 1, "a") + "'\n# " + "a" * 120 + "\n"
    assert signs.count_lines(text, ast.parse(text))["long_code_lines"] == long


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a, b = f(x), g(y)", 1),
        ("a, b = b, a", 1),
        ("(a, b) = c = 1, 2", 1),
        ("a, b = f(x)", 0),
        ("a, *b = 1, 2, 3", 0),
        ("a = 1, 2", 0),
        ("for a, b in c: pass", 0),
    ],
)
def test_parallel_assignments(text: str, count: int) -> None:
    assert signs.count_expressions(ast.parse(text))["parallel_assignments"] == count


@pytest.mark.parametrize(
    ("text", "count"), [("x = a if b else c if d else e", 2), ("if a:\n    x = b", 0)]
)
def test_conditional_expressions(text: str, count: int) -> None:
    assert signs.count_expressions(ast.parse(text))["conditional_expressions"] == count


@pytest.mark.parametrize(
    ("text", "total", "nested", "inside"),
    [
        ("[a for a in b if a]", 1, 0, 0),
        ("[[a], {a for a in b}, {a: a for a in b}, sum(a for a in b)]", 3, 0, 0),
        ("[a for b in c for a in b]", 1, 1, 0),
        ("[[[a for a in b] for b in c] for c in d]", 3, 0, 2),
        ("for a in b:\n    for c in a: pass", 0, 0, 0),
    ],
)
def test_comprehensions(text: str, total: int, nested: int, inside: int) -> None:
    counts = signs.count_expressions(ast.parse(text))
    assert counts["comprehensions"] == total
    assert counts["nested_comprehensions"] == nested
    assert counts["comprehensions_inside_another"] == inside


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pack.a", "pack.a"),
        ("from .a import b", "pack.inner.a"),
        ("from . import a", "pack.inner.a"),
        ("from .. import a", "pack.a"),
        ("from ..a import b", "pack.a"),
        ("def f():\n    from pack import a", "pack.a"),
        ("if TYPE_CHECKING:\n    from pack.a import b", "pack.a"),
    ],
)
def test_imports_are_found_wherever_they_are(text: str, name: str) -> None:
    assert name in signs.imported_names(text, "pack.inner")


def test_modules_with_one_importer(package) -> None:
    folder = package(
        {
            "__init__.py": "from .inner.offered import x\nfrom .own import y",
            "__main__.py": "from .twice import x\nimport pack.once",
            "own.py": "from . import own, twice",
            "once.py": "",
            "twice.py": "",
            "inner/__init__.py": "from .both import x",
            "inner/both.py": "",
            "inner/offered.py": "from .both import x",
        }
    )
    found = signs.single_importers(folder)
    assert found["without_init"] == {
        "pack.inner.both": "pack.inner.offered",
        "pack.once": "pack.__main__",
    }
    assert found["with_init"] == {"pack.inner.offered": "pack", "pack.once": "pack.__main__"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("__all__ = ['b', 'a']\nfrom .x import a, b, c", ["a", "b"]),
        ("from .x import a as a\nfrom . import b as _b\nimport c.d\n__version__ = '1'", ["a", "c"]),
        (
            "try:\n    A = 1\nexcept OSError:\n    A = 2\ndef f(): g = 1\nclass C: pass",
            ["A", "C", "f"],
        ),
        ("print(a)", []),
    ],
)
def test_public_names(text: str, names: list[str]) -> None:
    assert signs.public_names(text) == names


def test_the_program_prints_a_table_and_writes_the_same_numbers(
    package, tmp_path: Path, monkeypatch, capsys
) -> None:
    package({"_api.py": "from .a import f\n", "a.py": "def f(): ...\n", "__init__.py": ""})
    monkeypatch.setattr(signs, "ROOT", tmp_path)
    monkeypatch.setattr(signs, "PACKAGE", "pack")
    monkeypatch.setattr(signs, "GROUPS", {"wheel": ("pack",), "tests": ("tests",)})
    monkeypatch.setattr(signs, "cpu_seconds", len)
    path = tmp_path / "new/signs.json"
    signs.main(["--json", str(path)])
    result = json.loads(path.read_text())
    assert result["wheel"]["files"] == 3
    assert result["tests"]["files"] == 0
    assert result["one_importer"] == {
        "without_init": {"pack.a": "pack._api"},
        "with_init": {"pack.a": "pack._api"},
    }
    assert result["top_level_names"] == ["f"]
    assert result["import_cpu_seconds"] == len(", grapnet._api")
    assert str(tmp_path) not in path.read_text()
    printed = capsys.readouterr().out
    assert "code_lines" in printed
    assert "top-level names: 1\n" in printed
