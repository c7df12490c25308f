"""Pages of the documentation as the files that a reader makes of them, and the commands that run these.

The blocks of Python of a page are one script, for four ranks. A block that begins with the name of a file, as
``# reader.py``, is a part of that file, which a command on the page runs: ``torchrun --nproc-per-node 2 reader.py``,
``python reader.py`` or ``pytest reader.py``. A block of ``text`` is what the page's script prints on rank 0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import runpy
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from tests.torchrun import run_script

from shardwise.testing import run_on_ranks

DOCS = Path(__file__).parent.parent / "docs"
SCRIPT, RANKS = "page.py", 4
COMMAND = re.compile(r"^(?:torchrun --nproc-per-node (\d+)|(python|pytest)) (\w+\.py)(?: *#.*)?$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A page, by its path in the documentation."""

    name: str

    @cached_property
    def text(self) -> str:
        """All of it."""
        return (DOCS / self.name).read_text()

    def blocks(self, language: str) -> list[str]:
        """What stands between its fences, of one language."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, flags=re.DOTALL | re.MULTILINE)

    @cached_property
    def files(self) -> dict[str, str]:
        """Its code, by file."""
        files: dict[str, str] = {}
        for block in self.blocks("python"):
            named = re.match(r"# (\w+\.py)\n", block)
            name = named[1] if named else SCRIPT
            files[name] = files.get(name, "") + (block[named.end() :] if named else block)
        return files

    @cached_property
    def commands(self) -> list[tuple[str, str]]:
        """How its files are run, in order: on so many ranks, or by which program."""
        said = [(ranks or program, file) for ranks, program, file in COMMAND.findall("".join(self.blocks("sh")))]
        is_said = SCRIPT not in self.files or any(file == SCRIPT for _, file in said)
        return said if is_said else [*said, (str(RANKS), SCRIPT)]

    def not_in(self, printed: str) -> list[str]:
        """What it shows and was not printed; an ellipsis stands for anything, and lines may be broken elsewhere."""
        heard = " ".join(printed.split())
        patterns = {shown: " ".join(shown.split()).split("…") for shown in self.blocks("text")}
        return [shown for shown, parts in patterns.items() if not re.search(".*?".join(map(re.escape, parts)), heard)]

    def run(self, folder: Path) -> None:
        """Write its files into a folder, and do what its commands say; rank 0 is heard here."""
        for name, code in self.files.items():
            (folder / name).write_text(code)
        for how, name in self.commands:
            file = folder / name
            if how == "pytest":
                _run_tests(file)
            elif how == "python":
                with contextlib.chdir(folder):
                    runpy.run_path(str(file), run_name="__main__")
            else:
                run_on_ranks(int(how), run_script, str(file), str(folder), echo=True)


def _run_tests(file: Path) -> None:
    """Call all tests in a file, as pytest would; those on ranks find it by its path."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = ModuleType(file.stem)
    module.__file__, module.__spec__ = str(file), spec
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
        tests = [value for name, value in vars(module).items() if name.startswith("test_")]
        assert tests
        for test in tests:
            test()
    finally:
        del sys.modules[file.stem]
