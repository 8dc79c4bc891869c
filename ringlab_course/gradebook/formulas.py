"""Draw the formulas in hints as pictures inside a line of text, because pages may not load a typesetter."""

from __future__ import annotations

import re
from functools import cache

from markupsafe import Markup

SIZE = 16.0
"""Height of the font in pixels, the same as for a page's text."""

# TeX that matplotlib does not understand, and a spelling that it does.
_SPELLINGS = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\\mathrel\{(.)\}\s*=", r"\1\!="),
        (r"\\text\{([^{}]*)\}", lambda found: r"\mathrm{" + found[1].replace(" ", r"\ ") + "}"),
        (r"\\[lr]Vert(?![a-zA-Z])", r"\\|"),
        (r"\\([lg])e(?![a-zA-Z])", r"\\\1eq"),
        (r"\\top(?![a-zA-Z])", "T"),
        (r"\\bmod(?![a-zA-Z])", r"\\;\\mathrm{mod}\\;"),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?=[^a-zA-Z])", ""),
        (r"\\[td]frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\w)", r"\\frac{\1}{\2}"),
        (r"\\frac\s+(\w)\s*(\w)", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s+(\w)", r"\\sqrt{\1}"),
    )
)


@cache
def formula(tex: str) -> Markup:
    """Return a formula, given without dollars, as inline SVG with its source as text.

    A formula that cannot be drawn is returned as code.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser
    from matplotlib.textpath import TextPath

    text = tex
    for pattern, written in _SPELLINGS:
        text = pattern.sub(written, text)
    text = f"${text}$"
    try:
        width, height, depth, *_ = MathTextParser("path").parse(text, dpi=72, prop=FontProperties(size=SIZE))
        path = TextPath((0, 0), text, size=SIZE)
    except (ValueError, RuntimeError):  # the formula contains a command that matplotlib does not know
        return Markup("<code>{}</code>").format(tex)
    letters, steps = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}, []
    for vertices, code in path.iter_segments():
        steps.append(letters[int(code)] + ("" if code == 79 else " ".join(f"{x:.1f}" for x in vertices)))
    return Markup(
        '<svg class="formula" role="img" aria-label="{tex}" viewBox="0 {top:.1f} {width:.1f} {whole:.1f}" '
        'width="{width:.1f}" height="{whole:.1f}"><title>{tex}</title>'
        '<path transform="scale(1,-1)" fill="currentColor" d="{d}"/></svg>'
    ).format(tex=tex, top=-height, width=width, whole=height + depth, d="".join(steps))
