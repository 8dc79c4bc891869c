"""All entries of the errata, in groups. The errors with the worst consequences come first."""

from __future__ import annotations

from dataclasses import dataclass

from ringlab_course.errata.costs import COSTS
from ringlab_course.errata.entry import Entry
from ringlab_course.errata.gradients import GRADIENTS
from ringlab_course.errata.masks import MASKS
from ringlab_course.errata.messages import MESSAGES
from ringlab_course.errata.worked import KERNELS, WORKED


@dataclass(frozen=True)
class Group:
    """Entries about one subject, and a sentence about what such mistakes cost."""

    title: str
    about: str
    entries: tuple[Entry, ...]


GROUPS = (
    Group("Silently wrong results", "With these bugs training still works: the loss falls, the model is worse, and nothing reports an error.", GRADIENTS),
    Group("Which token sees which", "An index that is off by one rank is right in some layouts and passes some tests.", MASKS),
    Group("Who sends what to whom", "These make a run hang, or send messages that nobody needs.", MESSAGES),
    Group("Kernels", "You can try a compiler on any machine.", KERNELS),
    Group("Time and memory", "People buy machines and choose layouts by these numbers.", COSTS),
    Group("Worked examples", "Checking your own code against such an example makes you look for a bug that is not there.", WORKED),
)  # fmt: skip
