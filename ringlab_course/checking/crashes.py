"""Why the ranks of a learner's ring broke off: the mistake behind the error, by its name."""

from __future__ import annotations

import re

from ringlab_course.checking.failures import Crashed

BROKEN_RULES = {
    "a receive buffer that is also sent": "one_buffer",
    "written while it was sent": "writes_what_is_sent",
}
"""The mistake behind each rule of exchange, by what the transport says when it is broken."""


def broken_rule(crash: Crashed) -> str | None:
    """Return the name of the mistake that broke a rule of exchange, None if no rule was broken."""
    return next((name for text, name in BROKEN_RULES.items() if text in crash.counterexample), None)


def reason(crash: Crashed, *, ragged: bool) -> str | None:
    """Return the name of the mistake that made the ranks break off, None if it is not a known one."""
    told = crash.counterexample
    if name := broken_rule(crash):
        return name
    if re.search(r"'tuple' (object )?(has no|and )|concatenate tuple|and 'tuple'|not tuple|a tuple of", told):
        return "does_not_unpack"
    if ragged and ("MismatchError" in crash.message or re.search(r"size of tensor|shape", told)):
        return "assumes_equal_lengths"
    if not any(name in crash.message for name in ("DeadlockError", "UnreceivedError", "PeerDiedError")):
        return None
    if "ended without it" not in told and "never waited" in told:
        return "never_waits"
    return "leaves_the_ring"
