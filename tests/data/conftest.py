"""A machine without data: every place that is looked at lies in the test's own folder."""

from pathlib import Path

import pytest

from grapnet.data import places


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds the machine's `work` (the working directory), `home` and `usr`."""
    for name in ("work", "home", "usr"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("GRAPNET_DATA", raising=False)
    monkeypatch.setattr(places, "PREFIXES", (str(tmp_path / "usr"),))
    return tmp_path
