"""Settings of Sphinx for the course's pages. Nothing here may make a page load anything from another host."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from ringlab import __version__

project = "ringlab"
author = "The ringlab authors"
copyright = "The ringlab authors. Code: Apache-2.0. Text and pictures of the lessons: CC BY 4.0"
release = version = __version__
language = "en"
smartquotes = False
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72

extensions = ["myst_nb"]
exclude_patterns = ["_build", "downloads"]
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath", "strikethrough"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
suppress_warnings = ["myst.strikethrough"]  # a warning that only HTML has strikethrough

nb_execution_mode = "off"
# widgets are shown as pictures, because their code would be loaded from a CDN
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_merge_streams = True
nb_code_prompt_show = nb_code_prompt_hide = "Set-up code"

mathjax_path = "formulas.js"  # Sphinx loads this file on pages with formulas; it draws them with KaTeX
myst_update_mathjax = False

html_theme = "furo"
html_title = "ringlab"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["pages.js", "questions.js", "frames.js"]
html_search_scorer = str(Path(__file__).parent / "search_scorer.js")
html_favicon = html_logo = "static/ring.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "navigation_with_keys": False,
    "light_css_variables": {"color-brand-primary": "#0a5b8c", "color-brand-content": "#0a5b8c"},
    "dark_css_variables": {"color-brand-primary": "#6cc3f0", "color-brand-content": "#6cc3f0"},
}


def setup(app: Sphinx) -> None:
    """Write all pages again if something has changed that every page shows."""
    app.add_config_value("static_digest", "", "html")  # __main__ sets it; a new value outdates all pages
    app.connect("env-updated", _pages_with_old_surroundings)


def _pages_with_old_surroundings(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Return all pages if titles or places to link to differ from the last build, else none."""
    shown = (
        sorted((name, title.astext()) for name, title in env.titles.items()),
        sorted(env.toctree_includes.items()),
        sorted(env.domains.standard_domain.labels.items()),
        sorted(env.domains.python_domain.objects.items()),
        sorted((name, about.get("myst_slugs", {})) for name, about in env.metadata.items()),
    )
    known, now = Path(app.doctreedir, "surroundings"), repr(shown)
    if known.exists() and known.read_text(encoding="utf-8") == now:
        return []
    known.write_text(now, encoding="utf-8")
    return sorted(env.found_docs)
