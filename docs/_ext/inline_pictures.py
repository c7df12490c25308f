"""Puts the library's drawings into the page itself, where they take its colours and width, and answer the mouse.

A page shows one as any image, `![words](pictures/name.svg)`, so that it is there without the site too.
"""

from __future__ import annotations

import runpy
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from shardwise.layout.pictures import Picture

FOLDER = Path(__file__).parent.parent / "pictures"


class InlinePictures(SphinxPostTransform):
    """Replaces images in the folder of pictures by their drawings."""

    default_priority = 5  # before images are collected as files
    formats = ("html",)

    def run(self, **_: Any) -> None:
        """On one page."""
        for image in list(self.document.findall(nodes.image)):
            path = Path(self.env.srcdir) / image["uri"]
            if path.parent != FOLDER:
                continue
            label = escape(image["alt"], quote=True)
            raw = nodes.raw("", f'<div class="picture" role="img" aria-label="{label}">{drawing(path)}</div>')
            raw["format"] = "html"
            alone = isinstance(image.parent, nodes.paragraph) and len(image.parent) == 1
            (image.parent if alone else image).replace_self(raw)


def drawing(file: Path) -> str:
    """As a fragment that takes the width of the page; what only ranks can draw, as the file that they have drawn."""
    picture = pictures().get(file.name)
    return file.read_text(encoding="utf-8") if picture is None else picture.html()


@cache
def pictures() -> dict[str, Picture]:
    """All that one process draws alone."""
    found: dict[str, Picture] = runpy.run_path(str(FOLDER / "make.py"))["pictures"]()
    return found


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it."""
    app.add_post_transform(InlinePictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
