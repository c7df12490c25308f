"""How Sphinx makes the site of the pages in this folder and of the docstrings: `make docs`."""

import sys
from pathlib import Path

import shardwise

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "shardwise"
author = "The shardwise authors"
copyright = author
release = version = shardwise.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
    "name_links",
    "inline_pictures",
    "checked_links",
]
exclude_patterns = ["_build", "_ext", "pictures"]
nitpicky = True
# Types in signatures that have no page: those of others, for there is no network to look them up by, and inner ones.
nitpick_ignore_regex = [(r"py:(class|obj)", r"(?!shardwise\.[A-Z]\w*$).*")]

# Pages
smartquotes = False
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]

# Docstrings
default_role = "code"  # which `name_links` makes links of
add_module_names = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False

# Looks
html_theme = "furo"
html_title = f"shardwise {release}"
html_static_path = ["_static"]
html_logo = html_favicon = "_static/logo.svg"
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
html_theme_options = {
    "sidebar_hide_name": False,
    "navigation_with_keys": True,
    "light_css_variables": {
        "color-brand-primary": "#0b6089",
        "color-brand-content": "#0b6089",
        "color-code-background": "#f5f7f9",
    },
    "dark_css_variables": {
        "color-brand-primary": "#6cc1ea",
        "color-brand-content": "#6cc1ea",
    },
}
