"""Compile a one-device program for a mesh of P simulated devices, run it, and measure messages and memory.

In the judge this code runs in the worker, in the same process as the learner's code. The values can be
trusted, because the judge compares them. The counts are only as honest as the submission, like the loads and
stores of Triton kernels. A compiler for CPUs may widen the data that it sends, so the dtypes of messages are
read from the program before it is compiled. Only lax.scan records how often its loop turns; for
lax.while_loop the compiler's number is used.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from ringlab_course.checking.failures import Failure
from ringlab_course.checking.protocol import ProtocolError
from ringlab_course.checking.requirements import extra_is_missing
from ringlab_course.mesh import AXIS, DEVICES, HOST
from ringlab_course.mesh.compiled import UnknownForm, traffic


@dataclass
class Written:
    """The elements that a device sends, by type, as counted in the program before it is compiled.

    elements: those sent outside of while loops.
    loops: for each while loop that sends, how often the loop is run, and the elements sent in one of its
    turns.
    unclear: whether a message is in a place where it cannot be counted.
    hosts: the operations that call Python.
    """

    elements: Counter[str] = field(default_factory=Counter)
    loops: list[tuple[int, Counter[str]]] = field(default_factory=list)
    unclear: bool = False
    hosts: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, jaxpr: Any) -> Written:
        """Return the elements that a program sends, without operations whose results are unused."""
        from jax.interpreters import partial_eval

        needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        found = cls(hosts=set(_hosts(jaxpr)))
        _walk(needed, 1, found)
        return found

    def with_loops(self, compiled: Sequence[tuple[int, int]]) -> Counter[str] | None:
        """Return all elements by type, or None if the turns of some while loop are unknown.

        compiled: (elements per turn, turns) of each loop in the compiled program. Loops are matched by the
        size of a turn, so all loops of the same size must turn equally often.
        """
        total = Counter(self.elements)
        for times, once in self.loops:
            turns = {turns for size, turns in compiled if size == once.total()}
            if len(turns) != 1:
                return None
            total.update({kind: many * times * max(turns) for kind, many in once.items()})
        return None if self.unclear else total


def _walk(jaxpr: Any, times: int, found: Written) -> None:
    """Add to `found` all that the program sends in `times` runs, including loops of known length."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "ppermute":
            for sent in equation.invars:
                found.elements[str(sent.aval.dtype)] += times * math.prod(sent.aval.shape)
        if name == "while":
            condition, body = Written(), Written()
            _walk(equation.params["cond_jaxpr"].jaxpr, 1, condition)
            _walk(equation.params["body_jaxpr"].jaxpr, 1, body)
            # A condition runs once more than its body, and an inner loop has its own number of turns. So
            # their messages cannot be counted with those of the body.
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
    """Yield the programs inside an operation: a loop's body, branches, called functions."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner


QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Compiler options that halve the compile time.

They change only the machine code, because messages and buffers are decided earlier.
"""
BRANCH, TURNS = "branch", "turns"
LONGEST_WORD = 200


@dataclass(frozen=True)
class Examined:
    """The outcome of a program on a mesh.

    results: the program's whole arrays in float32, empty if it was not run.
    dtypes: the arrays' dtypes before they were converted to float32.
    fault: what is wrong with the form of the answer.
    not_run: why the program was compiled but not run, because it might hang: BRANCH if a message is in a
    branch, TURNS if a message is in a loop with an unknown number of turns.
    messages, blocks: what a device sends, counted in messages and in arrays of k's size.
    types: blocks by type, read before compilation because a compiler for CPUs may widen the data that it
    sends.
    untold: whether a loop's messages are missing in `types`, because its number of turns is not known.
    others: collectives besides ppermute, and callbacks of Python, by name.
    scratch: the bytes that a device needs besides its arguments and results.
    """

    results: tuple[np.ndarray, ...] = ()
    dtypes: tuple[str, ...] = ()
    fault: str = ""
    not_run: str = ""
    messages: int = 0
    blocks: float = 0.0
    types: dict[str, float] = field(default_factory=dict)
    untold: bool = False
    others: tuple[str, ...] = ()
    scratch: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, in the form that `taken_in` reads."""
        return dict(vars(self))


KINDS = {name: type(value) for name, value in vars(Examined()).items()}


def taken_in(value: Any) -> Examined:
    """Return the `Examined` that a worker sent as a dict. Raises: ProtocolError if its form is wrong."""
    ok = isinstance(value, dict) and set(value) == set(KINDS)
    ok = ok and all(type(value[name]) is kind for name, kind in KINDS.items())
    ok = ok and all(isinstance(part, np.ndarray) and part.dtype == np.float32 for part in value["results"])
    ok = ok and all(
        isinstance(word, str) and word.isprintable() and len(word) <= LONGEST_WORD
        for word in (value["fault"], *value["dtypes"], *value["types"], *value["others"])
    )
    ok = ok and value["not_run"] in ("", BRANCH, TURNS)
    ok = ok and all(
        type(count) in (int, float) and math.isfinite(count) and count >= 0
        for count in (value["messages"], value["blocks"], value["scratch"], *value["types"].values())
    )
    if not ok:
        raise ProtocolError("the answer, traffic and memory of an examined program", "something else")
    return Examined(**value)


MOST_KNOWN = 64
Loops: TypeAlias = Sequence[tuple[int, int]]
"""For each loop that sends something, the elements per turn and the number of turns."""
_known: dict[str, tuple[Any, Examined, Loops]] = {}
"""Compiled programs by their text before compilation, which determines the result."""


class _FormError(Exception):
    """The program's answer is not (out, lse). Raising this error ends the tracing."""


def examine(
    program: Callable[..., Any],
    positions: np.ndarray,
    arrays: Sequence[np.ndarray],
    cotangents: Sequence[np.ndarray] = (),
    *,
    dtype: str = "float32",
    keywords: Mapping[str, Any] | None = None,
    run: bool = True,
) -> Examined:
    """Return the outcome of `program(q, k, v, positions, **keywords)` on the devices of a mesh.

    positions: (P, L), the global positions that each device owns.
    arrays: q, k and v of all tokens, in the order of `positions`; they are converted to `dtype`.
    cotangents: with (dout, dlse), the results are out, lse, dq, dk and dv, and forward and backward are
    counted together, in one compiled program.
    run: if False, only types and dtypes are returned; the program is compiled only if the turns of a loop
    have to be known.

    Raises: Failure if JAX is not installed, has too few devices, or writes programs in an unknown form; also
    whatever the program raises.
    """
    if missing := extra_is_missing("jax"):
        raise Failure(f"This exercise needs the extra [jax]: {missing}")
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = _mesh(len(positions))
    tokens = NamedSharding(mesh, PartitionSpec(None, None, AXIS))
    given = [x.astype(jnp.dtype(dtype)) for x in arrays] + [x.astype(np.float32) for x in cotangents]
    given = [jax.device_put(x, tokens) for x in given]
    try:
        traced = _traced(program, mesh, positions, given, dict(keywords or {}))
    except _FormError as error:
        return Examined(fault=str(error)[:LONGEST_WORD])
    block = given[1].size / len(positions)
    written = Written.of(traced.jaxpr.jaxpr)
    typed = Examined(
        dtypes=tuple(str(part.dtype) for part in traced.out_info),
        types=_in_blocks(written.elements, block),
        others=tuple(sorted(written.hosts)),
    )
    if written.hosts or not (run or written.loops):
        return typed
    compiled, examined, loops = _compiled(traced.lower(), block)
    if examined.not_run:
        return examined
    elements = written.with_loops(loops)
    typed = replace(typed, types=_in_blocks(elements or written.elements, block), untold=elements is None)
    if not run:
        return typed
    results = tuple(np.asarray(part).astype(np.float32) for part in compiled(*given))
    return replace(examined, results=results, dtypes=typed.dtypes, types=typed.types, untold=typed.untold)


def _in_blocks(elements: Counter[str], block: float) -> dict[str, float]:
    return {kind: many / block for kind, many in elements.items()}


def _mesh(P: int) -> Any:
    """Return a mesh of the first P devices. Raises: Failure if there are too few devices."""
    import jax
    from jax.sharding import AxisType

    # After JAX's first computation these settings are refused, so the number of devices is checked below.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
    devices = jax.devices("cpu")
    if len(devices) < P:
        raise Failure(
            f"JAX has {len(devices)} simulated devices here, but {max(P, DEVICES)} are needed. The first "
            "computation fixes their number: restart the kernel and run the notebook from its first cell."
        )
    return jax.make_mesh((P,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:P])


def _traced(
    program: Callable[..., Any],
    mesh: Any,
    positions: np.ndarray,
    given: Sequence[Any],
    keywords: dict[str, Any],
) -> Any:
    """Return the program on all devices as JAX traces it.

    Raises: _FormError if it does not return (out, lse).
    """
    import jax
    from jax.sharding import PartitionSpec

    tokens = PartitionSpec(None, None, AXIS)

    def of_one_device(q: Any, k: Any, v: Any) -> Any:
        return _expect_state(program(q, k, v, positions, **keywords), q)

    whole = jax.shard_map(of_one_device, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)

    def step(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        (out, lse), back = jax.vjp(whole, q, k, v)
        return out, lse, *back((dout.astype(out.dtype), dlse.astype(lse.dtype)))

    return jax.jit(step if len(given) > 3 else whole).trace(*given)


def _compiled(lowered: Any, block: float) -> tuple[Any, Examined, Loops]:
    """Return the compiled program, with its counts and loops from `_looked_at`.

    block: the number of elements of one device's k.
    """
    text = lowered.as_text()
    if text not in _known:
        if len(_known) == MOST_KNOWN:
            _known.pop(next(iter(_known)))
        compiled = lowered.compile(QUICK)
        _known[text] = compiled, *_looked_at(compiled, block)
    return _known[text]


def _looked_at(compiled: Any, block: float) -> tuple[Examined, Loops]:
    """Return the counts of a compiled program's messages and memory, and its loops that send.

    Raises: Failure for a program in a form that cannot be read.
    """
    try:
        sent = traffic(compiled.as_text())
    except UnknownForm as unknown:
        raise Failure(
            "This version of JAX writes compiled programs in a form that ringlab cannot read; this is not "
            "your mistake. The versions in requirements.lock are known: "
            "pip install -c requirements.lock -e '.[jax]'",
            str(unknown),
        ) from None
    said = Examined(
        not_run=BRANCH if sent.in_branch else TURNS if sent.turns_unknown else "",
        messages=sent.messages,
        blocks=sent.elements / block,
        others=tuple(sorted(sent.others)),
        scratch=compiled.memory_analysis().temp_size_in_bytes,
    )
    return said, sent.loops


def _expect_state(answer: Any, q: Any) -> tuple[Any, Any]:
    """Return the program's answer. Raises: _FormError if it is not (out, lse) of this device's queries."""
    import jax.numpy as jnp

    if answer is None:
        raise _FormError("The answer is None, should be (out, lse): is the `return` missing?")
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        many = f" of {len(answer)} parts" if isinstance(answer, (tuple, list)) else ""
        raise _FormError(f"The answer should be a tuple (out, lse), but is a {type(answer).__name__}{many}.")
    for name, part, shape in (("out", answer[0], q.shape), ("lse", answer[1], q.shape[:-1])):
        if not hasattr(part, "shape") or not hasattr(part, "dtype"):
            raise _FormError(f"{name} should be an array, but is a {type(part).__name__}.")
        if tuple(part.shape) != tuple(shape):
            raise _FormError(
                f"{name} of a device has the shape {tuple(part.shape)}, should have {tuple(shape)}."
            )
        if not jnp.issubdtype(part.dtype, jnp.floating):
            raise _FormError(f"{name} should be float32, but is {part.dtype}.")
    return answer[0], answer[1]
