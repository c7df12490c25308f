"""Links names that pages and docstrings write as code, such as `from_local` or `shardwise.save(...)`, to the reference.

So a page stays plain Markdown that reads well where no site is built.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import ObjectEntry, PythonDomain
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"(?P<package>shardwise\.)?(?P<name>[A-Za-z_][\w.]*)(\(.*\))?", flags=re.DOTALL)
WITHIN = tuple(f"shardwise.{one}" for one in ("", "errors.", "testing.", "viz.", "partial.", "ShardedTensor."))
# Here a bare name is often another system's: only `shardwise.name` is ours for sure.
FULL_NAMES_ONLY = {"changelog", "limits", "migrating", "old-names", "why"}
LINKED = ("class", "exception", "function", "method", "classmethod")  # a property may be the name of an argument


class NameLinks(SphinxPostTransform):
    """Puts a link around each literal that is a documented name of the package."""

    default_priority = 400

    def run(self, **_: Any) -> None:
        """On one page."""
        for literal in list(self.document.findall(nodes.literal)):
            entry = None if _is_within_link(literal) else self._entry(literal.astext())
            if entry is None or _is_described(literal, entry.node_id):
                continue
            here, words = self.env.docname, literal.deepcopy()
            link = make_refnode(self.app.builder, here, entry.docname, entry.node_id, words)
            literal.replace_self(link)

    def _entry(self, text: str) -> ObjectEntry | None:
        """What the reference has of this name."""
        domain, found = self.env.get_domain("py"), NAME.fullmatch(text)
        assert isinstance(domain, PythonDomain)
        if found is None or (not found["package"] and self.env.docname in FULL_NAMES_ONLY):
            return None
        for within in WITHIN[:1] if found["package"] else WITHIN:
            entry = domain.objects.get(within + found["name"])
            if entry is not None and entry.objtype in LINKED:
                return entry
        inner = [entry for name, entry in domain.objects.items() if name.endswith(f".{found['name']}")]
        known = [entry for entry in inner if entry.objtype in ("function", "class") and not entry.aliased]
        return known[0] if len(known) == 1 and found["name"] != "Shard" else None  # which may be DTensor's


def _is_within_link(node: nodes.Node) -> bool:
    return isinstance(node.parent, nodes.reference | nodes.title)


def _is_described(node: nodes.Node | None, node_id: str) -> bool:
    """Whether the node is part of the description that the link would lead to."""
    while node is not None:
        if isinstance(node, nodes.Element) and any(node_id in child["ids"] for child in _signatures(node)):
            return True
        node = node.parent
    return False


def _signatures(node: nodes.Element) -> list[nodes.Element]:
    return [child for child in node.children if isinstance(child, nodes.Element) and child.tagname == "desc_signature"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it."""
    app.add_post_transform(NameLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
