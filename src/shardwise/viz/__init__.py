"""Pictures of layouts: as text for the terminal, as SVG for notebooks."""

from shardwise.viz.html import layout_html, layout_svg
from shardwise.viz.text import layout_text
from shardwise.viz.transfer import plan_text

__all__ = ["layout_html", "layout_svg", "layout_text", "plan_text"]
