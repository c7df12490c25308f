"""The documentation becomes a site: every page, docstring and link in it is in order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` does; a link that leads nowhere is a warning, and so is a page that no other one lists."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "read")]
    done = subprocess.run([*command, str(DOCS), str(tmp_path / "site")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "site" / "index.html").exists()
