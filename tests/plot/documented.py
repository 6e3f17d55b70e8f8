"""Draws the pictures of the documentation with its own code: `python -m tests.plot.documented`
writes docs/images.
"""

import os
import re
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

DOCS = Path(__file__).parents[2] / "docs"
# pictures, and the pages that draw them
PAGES = {
    "graph.png": "guides/pictures.md",
    "spaces.png": "guides/pictures.md",
    "deletion.png": "concepts.md",
}


def draw(name: str, folder: Path) -> Path:
    """Runs the page's code up to the block that writes this picture, in a folder, and returns where
    it is.
    """
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / PAGES[name]).read_text(), flags=re.MULTILINE | re.DOTALL
    )
    last = next(n for n, block in enumerate(blocks) if f'"{name}"' in block)
    known = {}
    here = Path.cwd()
    os.chdir(folder)
    try:
        for block in blocks[: last + 1]:
            exec(compile(block, PAGES[name], "exec"), known)
    finally:
        os.chdir(here)
    return folder / name


def shrink(picture: Path, path: Path) -> None:
    """Writes a picture with 256 colours; which matplotlib drew it stays in the file."""
    with Image.open(picture) as drawn:
        software = PngInfo()
        software.add_text("Software", drawn.info["Software"])
        small = drawn.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True, pnginfo=software)


if __name__ == "__main__":
    for name in PAGES:
        # A page may draw others on its way.
        with tempfile.TemporaryDirectory() as folder:
            shrink(draw(name, Path(folder)), DOCS / "images" / name)
