"""What each device sends, by type, as JAX writes a program down before anything is compiled.

A compiler for CPUs may widen what it sends, so that a compiled program does not say in which type an array
travels. How often a loop turns, though, is written down for lax.scan alone: of lax.while_loop the compiler knows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringlab_course.mesh import HOST


@dataclass
class Written:
    """Elements that a device sends, by type, and where they are counted yet once.

    elements: outside of while loops. loops: in one turn of each while loop that sends, with how often the loop itself
    is run. unclear: whether a message stands where nobody counts it. hosts: operations in which Python is called.
    """

    elements: Counter[str] = field(default_factory=Counter)
    loops: list[tuple[int, Counter[str]]] = field(default_factory=list)
    unclear: bool = False
    hosts: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, jaxpr: Any) -> Written:
        """Return what is written down of a program; what the compiler leaves out, as nobody uses it, is not sent."""
        from jax.interpreters import partial_eval

        needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        found = cls(hosts=set(_hosts(jaxpr)))
        _walk(needed, 1, found)
        return found

    def with_loops(self, compiled: Sequence[tuple[int, int]]) -> Counter[str] | None:
        """Return all elements by type; None where it is not known how often some while loop turns.

        compiled: (elements of one turn, turns) of the loops in the compiled program. Which of them a written one has
        become only its size says: all of that size have to turn as often.
        """
        total = Counter(self.elements)
        for times, once in self.loops:
            turns = {turns for size, turns in compiled if size == once.total()}
            if len(turns) != 1:
                return None
            total.update({kind: many * times * max(turns) for kind, many in once.items()})
        return None if self.unclear else total


def _walk(jaxpr: Any, times: int, found: Written) -> None:
    """Add what is sent while this is run `times` times; loops of known length multiply."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "ppermute":
            for sent in equation.invars:
                found.elements[str(sent.aval.dtype)] += times * math.prod(sent.aval.shape)
        if name == "while":
            condition, body = Written(), Written()
            _walk(equation.params["cond_jaxpr"].jaxpr, 1, condition)
            _walk(equation.params["body_jaxpr"].jaxpr, 1, body)
            # a condition is asked once more than its body turns, and a loop in a loop has turns of its own
            found.unclear |= bool(condition.elements or body.loops or body.unclear)
            if body.elements:
                found.loops.append((times, body.elements))
            continue
        turns = equation.params["length"] if name == "scan" else 1
        for inner in _inside(equation):
            _walk(inner, times * turns, found)


def _hosts(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in HOST:
            yield equation.primitive.name
        for inner in _inside(equation):
            yield from _hosts(inner)


def _inside(equation: Any) -> Iterator[Any]:
    """Yield what is written down inside of an operation: a loop's body, branches, what is called."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner
