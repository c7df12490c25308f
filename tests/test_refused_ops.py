"""What a gather budget of 0 refuses of torch's own database of ops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.coverage.refused import REFUSED


def test_just_the_listed_ops_are_refused() -> None:
    """An op that is refused no longer must leave the list, and no other may come; in a process of its own."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.coverage.one_process"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = set(json.loads(done.stdout))
    listed = [name for names in REFUSED.values() for name in names]
    assert len(set(listed)) == len(listed)
    assert sorted(found - set(listed)) == [], "refused, and not listed"
    assert sorted(set(listed) - found) == [], "listed, and no longer refused"
