"""Checks, when the site is built, that every link within it leads to a file and to a place in it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


class Page(HTMLParser):
    """What a page links to, and what can be linked to in it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places = {"", "top"}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note links and ids."""
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif value and ((tag, name) in (("a", "href"), ("link", "href"), ("img", "src"), ("script", "src"))):
                self.links.add(value)


def check(app: Sphinx, error: Exception | None) -> None:
    """Warn of each link that leads nowhere; `make docs` takes warnings for errors."""
    if error is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    pages = {file: Page(file) for file in folder.rglob("*.html")}
    for file, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file():
                logger.warning("%s: no such file: %s", file.relative_to(folder), link)
            elif target in pages and unquote(parts.fragment) not in pages[target].places:
                logger.warning("%s: no such place: %s", file.relative_to(folder), link)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
