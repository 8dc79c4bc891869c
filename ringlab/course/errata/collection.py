"""All entries, in groups: what costs people most comes first."""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.course.errata.costs import COSTS
from ringlab.course.errata.entry import Entry
from ringlab.course.errata.gradients import GRADIENTS
from ringlab.course.errata.kernels import KERNELS
from ringlab.course.errata.masks import MASKS
from ringlab.course.errata.messages import MESSAGES
from ringlab.course.errata.worked import WORKED


@dataclass(frozen=True)
class Group:
    """Entries of one kind, and what such mistakes cost."""

    title: str
    about: str
    entries: tuple[Entry, ...]


GROUPS = (
    Group("Wrong numbers that nobody sees", "These train: the loss goes down, and the model is worse than it should be. Nothing says so.", GRADIENTS),
    Group("Which token sees which", "An index that is off by a rank is right in some layouts, and in some tests.", MASKS),
    Group("Who sends what to whom", "Here a run hangs, or pays for messages that nobody needs.", MESSAGES),
    Group("Kernels", "A compiler's word can be had for nothing, on any machine.", KERNELS),
    Group("Time and memory", "Machines are bought, and layouts chosen, by these numbers.", COSTS),
    Group("Worked examples", "Whoever checks their own code against such an example looks for a bug that is not there.", WORKED),
)  # fmt: skip
