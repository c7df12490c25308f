"""The documentation becomes a site: every page, docstring and link in it is in order."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.pictures import sample_report

from shardwise.report import page

DOCS = Path(__file__).parent.parent / "docs"
DATA = re.compile(r'(?<=id="data">).*?(?=</script>)', flags=re.DOTALL)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` does; a link that leads nowhere is a warning, and so is a page that no other one lists."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "read")]
    done = subprocess.run([*command, str(DOCS), str(tmp_path / "site")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "site" / "index.html").exists()


def test_the_sample_report_is_one_of_today() -> None:
    """It has what a page has now, and is small; ``make pictures`` writes it."""
    text = sample_report.FILE.read_text(encoding="utf-8")
    assert len(text) < 400_000
    made = page(sample_report.report())
    shown, new = (json.loads(DATA.findall(one)[0]) for one in (text, made))
    assert shown.keys() == new.keys()
    assert DATA.sub("", text) == DATA.sub("", made), "report.html is not up to date: make pictures"
