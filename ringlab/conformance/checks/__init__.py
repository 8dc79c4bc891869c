"""The table of checks: each check's requirement, tier, runs and judge."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ringlab.conformance.checks.arguments import ARGUMENT_CHECKS
from ringlab.conformance.checks.call_patterns import CALL_CHECKS
from ringlab.conformance.checks.check import Check
from ringlab.conformance.checks.dropout import DROPOUT_CHECKS
from ringlab.conformance.checks.faults import FAULT_CHECKS
from ringlab.conformance.checks.order import ORDER_CHECKS
from ringlab.conformance.checks.pairs import PAIR_CHECKS
from ringlab.conformance.checks.placed_shards import SHARD_CHECKS
from ringlab.conformance.checks.resources import RESOURCE_CHECKS
from ringlab.conformance.checks.values import PRECISION_CHECKS, VALUE_CHECKS
from ringlab.errors import BackendError

LOADS = "loads"
"""The check before all others: the target can be imported and its claims are valid."""
CHECKS: tuple[Check, ...] = (
    *VALUE_CHECKS, *PRECISION_CHECKS, *ORDER_CHECKS, *CALL_CHECKS, *ARGUMENT_CHECKS, *SHARD_CHECKS, *PAIR_CHECKS, *DROPOUT_CHECKS, *RESOURCE_CHECKS, *FAULT_CHECKS,
)  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names of all checks, in the order in which they are reported.

    >>> names()[:3]
    ('loads', 'types', 'forward')
    """
    return (LOADS, *(check.name for check in CHECKS))


def chosen(only: tuple[str, ...] = ()) -> tuple[Check, ...]:
    """Return the checks called `only`, in the order of the table, or all of them if no name is given.

    Raises: BackendError for an unknown name.

    >>> [check.name for check in chosen(("dq", "forward"))]
    ['forward', 'dq']
    """
    refuse_unknown(only, names())
    return tuple(check for check in CHECKS if not only or check.name in only)


def refuse_unknown(only: Iterable[str], known: Collection[str]) -> None:
    """Check that all names are `known`.

    Raises: BackendError for an unknown name.

    >>> refuse_unknown(["dq"], names())
    """
    if unknown := [name for name in only if name not in known]:
        raise BackendError(f"checks among {', '.join(known)}", ", ".join(map(repr, unknown)))
