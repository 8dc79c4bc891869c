"""Why a check is there that stands alone for no wrong answer, is not the first to find any, and names none alone."""

from __future__ import annotations

_FRESH = "held out: cases that no visible check has, for an answer that was fitted to those."

TOGETHER = {
    "01.causal:any": _FRESH,
    "01.attention:sharp": "large scores; who mends 01.softmax and does not use it here still fails.",
    "02.merge:order": (
        "a merge that is wrong for a part without keys or for a large lse is wrong here too; what is asked is that it is "
        "associative, on which the ring of lesson 05 rests."
    ),
    "02.merge:many": _FRESH,
    "04.flash:any": _FRESH,
    "04.causal:any": _FRESH,
    "06.table:published": (
        "whoever is wrong here is wrong on the small model too, where the numbers can be followed on paper; here stand "
        "the 21 figures of the paper, which is what the stage is for."
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
    "10.error:scale": "the unit of the numbers is all that changes, so that the reason is plain to see.",
    "10.error:any": _FRESH,
    "10.fold:parts": "more than one part into a state, before parts are empty, narrow or large.",
    "10.accept:units": "the size of v is all that changes, so that the reason is plain to see.",
    "10.accept:any": _FRESH,
    "10.diagnose:any": _FRESH,
    "12.ends:both": "one rank's only step is the first and the last; each end may be right by itself.",
    "12.ends:middle": "a step that is neither; OUT that is written too early is found by the last step as well.",
    "12.step:empty": "a block without a key, as a rank without tokens sends it.",
    "12.step:large": "scores in the hundreds, met by the whole step and not by one tile.",
    "12.table:ragged": "rows and keys that fill no tile, and foreign rows beside them.",
    "12.table:heads": "grouped heads by the table; 12.step:grouped looks at another kernel.",
    "12.table:without_mask": _FRESH,
    "17.couriers:any": "an odd number of devices and positions in no order; the visible check has a zig-zag of four.",
}
"""By stage and check."""
