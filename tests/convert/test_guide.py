"""The code of the guide runs."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs/guides/convert.md"


def test_the_guide_runs_from_top_to_bottom(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), names)
    assert "Linear(in_features=16, out_features=48, bias=True)" in capsys.readouterr().out
