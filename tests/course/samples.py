"""A small course in a temporary folder, for tests of the builder."""

from __future__ import annotations

from pathlib import Path

LESSON = """# %% [markdown]
# # 91 · A small lesson
# **Afterwards you can** see. **You need first** nothing. **Minutes** 3.

# %%
import sys

from ringlab_course import compare, predict
from ringlab.viz.style import new_figure, show, styled

# %%
print("one", flush=True)
print("two", file=sys.stdout)
1 + 1

# %% tags=["nbval-ignore-output"]
predict("91.n", "How many?", choices=["1", "2"])

# %%
compare("91.n", "2")

# %%
with styled():
    figure = new_figure((2, 1))
    figure.subplots().plot([1, 2, 4])
show(figure, alt="a line that rises faster and faster")

# %%
import_free = True

# %%
import_free = True

# %% [markdown]
# ## Recap
# ## Self-check
# [the exercise](../exercises/91_small.ipynb)
"""

EXERCISE = '''# %% [markdown]
# # Exercise 91
# **Minutes** 3.

# %%
from ringlab_course import check

# %% grade="91.double"
def double(x):
    """Twice x."""
    # BEGIN SOLUTION return twice x
    y = x + x
    return y
    # END SOLUTION

# %%
double_or_not = "kept"

# %% tags=["solution-only"]
print(double(4))

# %%
# check("91.double")
'''


def small_course(root: Path) -> Path:
    """Write the sources of a course with one lesson and one exercise under `root`; return it."""
    for path, text in (
        (lesson_source(root), LESSON),
        (exercise_source(root), EXERCISE),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def lesson_source(root: Path) -> Path:
    """Return where the source of the lesson is."""
    return root / "ringlab_course/lessons/91_small.py"


def exercise_source(root: Path) -> Path:
    """Return where the source of the exercise is."""
    return root / "ringlab_course/exercises/e91_small/exercise.py"
