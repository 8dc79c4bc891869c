"""Every mistake that the checks know by name: its message, the checks that find it, and a helpful question.

For each check that is never the only one to find a wrong answer, this file also contains the reason for the
check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringlab_course.checking.contract import Exercise, Misconception, Stage
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.wrong_answers import found_by

from .links import escape, slug, toctree
from .notebooks import stage_anchor

_INTRO = """\
# Misconceptions

A wrong answer is worth more than a red cross. Each check of the exercises computes the common mistakes as well, compares
them with what it got, and says which one it sees. Here are all {count} that the checks know by name, in the words that
learners read, with the question that leads out of each: the first hint of its stage.

Which wrong program stands for which of them, and which check finds it: [the kill matrix](../docs/kill-matrix.md).

{all}
"""
_PAGE = """\
# Misconceptions {id} · {title}

From {where}. Try it first: this page says what is easy to get wrong there. Each name is one that the checks use.
"""


@dataclass(frozen=True)
class Entry:
    """One message, and the names of the mistakes that get it, because variants of a mistake share a message."""

    names: tuple[str, ...]
    message: str
    found_by: tuple[str, ...]

    def anchor(self, stage: Stage) -> str:
        """Return the anchor of this entry on the page of its exercise."""
        return slug("mistake", stage.id, self.names[0])


def exercises() -> list[Exercise]:
    """Return the contracts of all exercises."""
    return [load_exercise(exercise_id) for exercise_id in exercise_ids()]


def entries(stage: Stage) -> list[Entry]:
    """Return the mistakes of a stage in its own order; mistakes with the same message share an entry."""
    together: dict[str, list[Misconception]] = {}
    for misconception in stage.misconceptions:
        together.setdefault(misconception.message, []).append(misconception)
    found, finds = [], found_by(stage.id)
    for message, same in together.items():
        names = tuple(misconception.name for misconception in same)
        titles = tuple(check.title for check in stage.checks if finds.get(check.id, set()) & set(names))
        found.append(Entry(names, message, titles))
    return found


def pages(there: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for the index page, and for a page for each exercise.

    there: the exercises that have a page to which to link.
    """
    known = [exercise for exercise in exercises() if any(stage.misconceptions for stage in exercise.stages)]
    count = sum(len(stage.misconceptions) for exercise in known for stage in exercise.stages)
    index = _INTRO.format(count=count, all="\n\n".join(map(_summary, known)))
    names = [f"misconceptions/{exercise.slug}" for exercise in known]
    yield "misconceptions/index", index + "\n" + toctree([f"/{name}" for name in names])
    for name, exercise in zip(names, known, strict=True):
        yield name, _page(exercise, exercise.slug in there)


def _summary(exercise: Exercise) -> str:
    """Return an exercise's part of the index: its stages, their questions, and a link to each mistake."""
    parts = [f"## [{exercise.id} · {escape(exercise.title)}]({exercise.slug}.md)"]
    for stage in exercise.stages:
        if stage.misconceptions:
            links = ", ".join(
                f"[{escape(_spoken(entry.names[0]))}](#{entry.anchor(stage)})" for entry in entries(stage)
            )
            parts += [f"**{stage.id}** {escape(stage.title)}. *{escape(stage.hints[0])}*", f"{links}."]
    return "\n\n".join(parts)


def _page(exercise: Exercise, linked: bool) -> str:
    where = (
        f"[exercise {exercise.id}](../exercises/{exercise.slug}.ipynb)"
        if linked
        else f"exercise {exercise.id}"
    )
    parts = [_PAGE.format(id=exercise.id, title=escape(exercise.title), where=where)]
    for stage in exercise.stages:
        if stage.misconceptions:
            parts.append(f"## {stage.id} · {escape(stage.title)}")
            parts.append(f"**Ask yourself:** {escape(stage.hints[0])}")
            if linked:
                parts.append(f"The task: [{stage.id}](#{stage_anchor(stage.id)}).")
            parts += [_entry(entry, stage) for entry in entries(stage)]
    return "\n\n".join(parts) + "\n"


def _entry(entry: Entry, stage: Stage) -> str:
    others = [f"`{name}`" for name in entry.names[1:]]
    variants = f" (also {', '.join(others)})" if others else ""
    found = "; ".join(escape(title) for title in entry.found_by)
    found_by = f"\n\n  *Found by:* {found}" if found else ""
    return f"({entry.anchor(stage)})=\n`{entry.names[0]}`{variants}\n: {escape(entry.message)}{found_by}"


def _spoken(name: str) -> str:
    return name.replace("_", " ")


_MANY = "eight ranks, for an answer that was fitted to two or three."
_FRESH = "held out: cases that no visible check has, for an answer that was fitted to those."

TOGETHER = {
    "01.causal:any": _FRESH,
    "01.attention:any": _FRESH,
    "01.grouped:any": _FRESH,
    "01.attention:sharp": "large scores; who mends 01.softmax and does not use it here still fails.",
    "02.merge:order": (
        "a merge that is wrong for a part without keys or for a large lse is wrong here too; what is asked is that it is "
        "associative, on which the ring of lesson 05 rests."
    ),
    "02.merge:many": _FRESH,
    "02.stream:sharp": "large scores and nothing else; the checks of bf16 and of memory meet them among other things.",
    "02.stream:ragged": "a short last block and nothing else; the other checks have one among other things.",
    "03.forward:mixed": _FRESH,
    "03.backward:mixed": _FRESH,
    "04.flash:any": _FRESH,
    "04.causal:any": _FRESH,
    "04.flash:heads": "a group of heads that share keys, before rows that fill no block are added.",
    "05.forward:bfloat16": "inputs as models have them, and values alone; the check of bytes meets them among other things.",
    "05.forward:eight_ranks": _MANY,
    "05.forward:memory": "blocks of megabytes, which the visible check has no time for: there a page more could hide.",
    "07.work:ragged": "runs of different lengths and nothing else; the other checks have them among other things.",
    "07.ring:any_layout": _FRESH,
    "08.deal:any": _FRESH,
    "11.uneven:eight_ranks": _MANY,
    "06.table:published": (
        "an answer that is wrong here is wrong on the small model too, where one can follow the numbers on paper; this "
        "check asks for the paper's own models, which is what the stage is for."
    ),
    "07.work:shuffled": _FRESH,
    "07.relation:any_start": "runs that begin anywhere, where the visible ones are those of layouts.",
    "07.makespan:layouts": "the tables are those of real layouts, which a learner's own numbers never are.",
    "08.runs:every_layout": _FRESH,
    "08.tiles:edges": "rows that fill no tile, and ranks without a token.",
    "08.tiles:any": _FRESH,
    "08.balance:uneven": _FRESH,
    "08.packed:short": "documents that are shorter than 2P tokens, beside long ones.",
    "08.packed:ranks": _FRESH,
    "09.couriers:eight_ranks": (
        "shared heads and posts as late as a transport may make them, which no other check of values has."
    ),
    "09.traffic:any": _FRESH,
    "10.error:scale": "the unit of the numbers is all that changes, so that the reason is plain to see.",
    "10.error:any": _FRESH,
    "10.fold:parts": "more than one part into a state, before parts are empty, narrow or large.",
    "10.fold:large": "large lse and nothing else; empty and fresh parts bring the same mistake to light among other things.",
    "10.accept:units": "the size of v is all that changes, so that the reason is plain to see.",
    "10.accept:any": _FRESH,
    "10.diagnose:ranks": "curves over other numbers of blocks, for an answer that was fitted to those of the lesson.",
    "10.diagnose:any": _FRESH,
    "12.ends:both": "one rank's only step is the first and the last; each end may be right by itself.",
    "12.ends:middle": "a step that is neither; OUT that is written too early is found by the last step as well.",
    "12.step:empty": "a block without a key, as a rank without tokens sends it.",
    "12.step:large": "scores in the hundreds, met by the whole step and not by one tile.",
    "12.step:ragged": "queries and keys that fill no tile, met by the whole step and not by one tile.",
    "12.table:ragged": "rows and keys that fill no tile, and foreign rows beside them.",
    "12.table:heads": "grouped heads by the table; 12.step:grouped looks at another kernel.",
    "12.table:layouts": "windows in striped, zig-zag and token fold; whatever they show, another case shows as well.",
    "12.table:without_mask": _FRESH,
    "13.lanes:edges": "profiles that nobody would record; the other checks meet each edge among other things.",
    "13.straggler:any": _FRESH,
    "17.couriers:any": "an odd number of devices and positions in no order; the visible check has a zig-zag of four.",
    "17.window:layouts": "other layouts, and windows that end at a block's edge, which no visible check has.",
    "21.backward:bytes": "exact bytes in bfloat16 and of shards of different lengths; the visible check allows for more.",
}
"""The reasons, by stage and check."""
