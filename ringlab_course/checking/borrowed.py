"""Whether a learner's function in a notebook leaves its work to ringlab or PyTorch, read off its code: nothing is run."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import ringlab
from ringlab_course.checking.contract import Exercise
from ringlab_course.judge.offlimits import LEFT_TO_OTHERS, PACKAGES, OffLimits, is_attention


def borrowed(exercise: Exercise, functions: Iterable[str], namespace: Mapping[str, Any]) -> str:
    """Return what to tell a learner whose functions use what is off limits in this exercise; "" where none does.

    Looks at the functions and at those of the notebook that they call. Calls that are hidden better are found
    by the judge, or by nobody.
    """
    limits = OffLimits.of(exercise)
    for name in functions:
        function = namespace.get(name)
        for used in _uses(function, set()) if isinstance(function, FunctionType) else ():
            module, _, own = used.rpartition(".")
            if limits.refuses(module, own) or (module == "ringlab" and limits.refuses(used, "")):
                return f"{LEFT_TO_OTHERS.format(name)} It uses {used}."
    return ""


def _uses(function: FunctionType, seen: set[CodeType]) -> Iterator[str]:
    """Yield the dotted names of what is not the notebook's own and is used by `function`, or by what it calls."""
    if function.__code__ in seen:
        return
    seen.add(function.__code__)
    for chain in _chains(function.__code__):
        value = function.__globals__.get(chain[0])
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _uses(value, seen)
        elif isinstance(value, ModuleType):
            yield _inside(value.__name__, chain[1:])
        elif value is not None:
            own = getattr(value, "__name__", "")
            home = getattr(value, "__module__", None) or ("torch" if is_attention(own) else "")
            yield f"{home}.{own}"
        elif chain[0].partition(".")[0] in (*PACKAGES, "torch"):  # imported by the function itself
            yield _inside(chain[0], chain[1:])


def _inside(place: str, attributes: list[str]) -> str:
    """Return what the attributes after a module's name lead to: `F.softmax`, `ringlab.oracle.attention`."""
    for attribute in attributes:
        if place == "ringlab":
            place = ringlab._HOME.get(attribute, place)
        place += f".{attribute}"
    return place


def _chains(code: CodeType) -> Iterator[list[str]]:
    """Yield the names that code takes from outside, each with the attributes it takes from them in one go."""
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and chain:
            chain.append(str(step.argval))
            continue
        if chain:
            yield chain
        outside = step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
        chain = [str(step.argval)] if outside else []
    if chain:
        yield chain
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains(inner)
