"""The pictures in the documentation are those that the code above them draws."""

import re

import matplotlib
import numpy as np
import pytest
from PIL import Image

from .documented import DOCS, PAGES, draw


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_picture_that_its_code_draws(name, tmp_path):
    text = (DOCS / PAGES[name]).read_text()
    committed = DOCS / "images" / name
    shown = text[text.index(f'"{name}"') :]
    assert re.search(r"!\[[^]]*\]\((?:\.\./)*images/(.*?)\)", shown)[1] == name
    assert committed.stat().st_size < 100_000
    with Image.open(committed) as kept, Image.open(draw(name, tmp_path)) as drawn:
        assert kept.size == drawn.size
        same = f"version{matplotlib.__version__}," in kept.info["Software"]
        colors = [np.asarray(picture.convert("RGB"), dtype=float) for picture in (kept, drawn)]
    # 256 colours are nearer than that; a digit has ten such
    other = np.abs(colors[0] - colors[1]).max(axis=-1) > 100
    most = 5 if same else 0.05 * other.size  # letters of other versions of matplotlib differ
    assert int(other.sum()) < most, (
        "`python -m tests.plot.documented` draws it again; look at it before you commit it"
    )
