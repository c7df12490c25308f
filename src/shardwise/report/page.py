"""HTML of a report: one file that holds its style, its scripts and its data."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from pathlib import Path

from shardwise.report.data import Report

SCRIPTS = (
    "units",
    "elements",
    "colours",
    "choice",
    "table",
    "header",
    "memory",
    "alive",
    "spans",
    "timeline",
    "differences",
    "modules",
    "model",
    "traffic",
    "plans",
    "main",
)


def page(report: Report) -> str:
    """The whole page. It asks for nothing over the network, and its content security policy forbids it."""
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    parts = {
        "title": html.escape(report.title),
        "style": _asset("page.css"),
        "data": _json(report),
        "script": f'"use strict";\n(() => {{\n{scripts}\n}})();',
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def save_page(report: Report, path: str | Path) -> Path:
    """Writes the page to a file and gives its path."""
    path = Path(path)
    path.write_text(page(report), encoding="utf-8")
    return path


def notebook(report: Report, *, height: int = 760) -> str:
    """The page as an element of a notebook, for `_repr_html_`: in a frame, so that styles do not mix."""
    return (
        f'<iframe title="{html.escape(report.title)}" srcdoc="{html.escape(page(report))}" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def _json(report: Report) -> str:
    """No character of it can end the script element that holds it."""
    text = json.dumps(report.as_json(), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (files("shardwise.report") / "assets" / name).read_text(encoding="utf-8")
