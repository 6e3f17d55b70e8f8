"""Without its library an integration names what to install, and the rest of GrapNet works."""

import importlib
import sys

import pytest

import grapnet as gn
from grapnet import plot
from grapnet.integrations._extra import require


@pytest.mark.parametrize(
    ("library", "extra", "use"),
    [
        ("networkx", "networkx", lambda: gn.GrapNet([3, 2]).to_networkx()),
        ("matplotlib", "plot", lambda: plot.adjacency(gn.GrapNet([3, 2]))),
        ("sklearn", "sklearn", lambda: importlib.import_module("grapnet.integrations.sklearn")),
        (
            "lightning",
            "lightning",
            lambda: importlib.import_module("grapnet.integrations.lightning"),
        ),
    ],
)
def test_the_error_names_the_install(library, extra, use, monkeypatch):
    for name in list(sys.modules):
        if name.startswith((f"{library}.", f"grapnet.integrations.{extra}")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"grapnet\[{extra}\]") as caught:
        use()
    assert caught.value.name == library


def test_another_missing_library_is_not_blamed_on_the_extra(tmp_path, monkeypatch):
    (tmp_path / "needing.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        require("needing", "plot")
