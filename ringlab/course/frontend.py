"""Is somebody there to click? Widgets are shown only then; otherwise their static form."""

from __future__ import annotations

import os
import sys

VARIABLE = "RINGLAB_STATIC"
"""Set to 1 where notebooks are executed without a person: the builder and the tests do."""


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def is_live() -> bool:
    """Return whether a person sees this notebook, so that widgets make sense."""
    return in_notebook() and os.environ.get(VARIABLE, "0") != "1"
