"""Wrong kernels, each made by one small change of the right text, and the check that finds each.

A mutant names the function whose text is changed; the text to replace occurs there exactly once.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import ringlab.blocks.triton as package

_FOLDER = Path(package.__file__).parent
_IMPORTS = {
    "addressing.py": "from ringlab.blocks.triton.addressing import places, strides, tile\n",
    "scoring.py": "from ringlab.blocks.triton.scoring import kept, spoil, tanh\n",
}


@dataclass(frozen=True)
class Mutant:
    name: str
    function: str
    old: str
    new: str
    dies_in: str

    def __str__(self) -> str:
        return f"{self.function.lstrip('_')}: {self.name}"


def source() -> str:
    """Return the text of the kernels, with the functions that they import inserted before their own."""
    kernels = (_FOLDER / "kernels.py").read_text(encoding="utf-8")
    functions = ""
    for name, line in _IMPORTS.items():
        before, after = kernels.split(line)
        text = (_FOLDER / name).read_text(encoding="utf-8")
        kernels = before + after
        functions += text[re.search(r"^(# fmt: off\n)?@triton\.jit", text, re.MULTILINE).start() :] + "\n\n"
    before, first = kernels.split("# fmt: off\n", 1)
    return f"{before}{functions}# fmt: off\n{first}"


def mutated(source: str, mutant: Mutant) -> str:
    """Return the text of the kernels with the mutant's change. Raises: ValueError unless it applies exactly once."""
    found = re.search(rf"^def {mutant.function}\(.*?(?=^@triton\.jit|\Z)", source, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"needed: a function {mutant.function} in the kernels")
    count = found.group().count(mutant.old)
    if count != 1:
        raise ValueError(f"needed: {mutant.old!r} once in {mutant.function}\n   got: {count} times")
    changed = found.group().replace(mutant.old, mutant.new)
    return source[: found.start()] + changed + source[found.end() :]


def loaded(source: str, folder: Path) -> ModuleType:
    """Return a module of kernels with this text, loaded from a file, as the interpreter requires."""
    path = folder / "mutated_kernels.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutated_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_VISIBLE = "keys[None, :] <= rows[:, None] + shift"
_VISIBLE_KEYS = "keys[:, None] <= rows[None, :] + shift"
_WINDOW = "keys[None, :] >= rows[:, None] + low"
_WINDOW_KEYS = "keys[:, None] >= rows[None, :] + low"
_CARRIED = "tile(ACC + state * VALUE_DIM, row, VALUE_DIM, owned, BLOCK_M, VALUE_DIM, BLOCK_V, True)"
_CARRIED_DQ = _CARRIED.replace("VALUE_DIM", "HEAD_DIM").replace("BLOCK_V", "BLOCK_D")
_DP, _DP_KEYS = (
    f"dp = tl.dot({pair}, input_precision=PRECISION)" for pair in ("dout, tl.trans(v)", "v, tl.trans(dout)")
)
_ROUND = ".to(Q.dtype.element_ty).to(tl.float32)"
_QK = "tl.dot(q, tl.trans(k), input_precision=PRECISION)"

FORWARD = (
    Mutant("a row does not see its own key", "_attend", _VISIBLE, _VISIBLE.replace("<=", "<"), "causal_ring"),
    Mutant("keys after the ragged end count", "_attend", "inside[None, :] & ", "", "full_ring"),
    Mutant("scores round to the dtype of q", "_attend", _QK, f"{_QK}.to(q.dtype)", "large_float16"),
    Mutant(
        "scores round to the dtype of q, a little", "_attend", _QK, f"{_QK}.to(q.dtype)", "exact_scores"
    ),
    Mutant("−inf − (−inf)", "_attend", 'tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new", "rows_that_see_nothing"),
    Mutant("masked tiles are scaled twice", "_attend", "factor = 1.0", "factor = unit", "own_scale"),
    Mutant("the carried sum of values is rounded", "forward_step", _CARRIED, f"{_CARRIED}{_ROUND}", "carried_in_float32"),
    Mutant(
        "keys of another head", "forward_step",
        "K + batch * k_b + tl.cast(query_head // GROUP, tl.int64)",
        "K + batch * k_b + tl.cast(query_head % GROUP, tl.int64)",
        "batches",
    ),
    Mutant(
        "tokens lie head dim after head dim", "forward_step",
        "q = tile(q_base, row, q_l,",
        "q = tile(q_base, row, HEAD_DIM,",
        "stored_otherwise",
    ),
    Mutant("strides in elements", "strides", "tokens * UNIT", "tokens", "stored_otherwise"),
    Mutant("a unit of 8 for every head dim", "strides", "(DIM | 8) & -(DIM | 8)", "8", "causal_ring"),
)  # fmt: skip

BACKWARD = (
    Mutant("a row does not see its own key", "_add_to_dq", _VISIBLE, _VISIBLE.replace("<=", "<"), "causal_ring"),
    Mutant("scores round to the dtype of q", "_add_to_dq", _QK, f"{_QK}.to(q.dtype)", "large_float16"),
    Mutant("a step forgets the sum", "backward_dq", "if FIRST:", "if True:", "full_ring"),
    Mutant("the carried sum is rounded", "backward_dq", _CARRIED_DQ, f"{_CARRIED_DQ}{_ROUND}", "carried_in_float32"),
    Mutant("dP rounds to the dtype of q", "_add_to_dq", _DP, f"{_DP}.to(q.dtype)", "large_products_float16"),
    Mutant("keys and values of another head", "backward_dq", "query_head // GROUP", "query_head % GROUP", "batches"),
    Mutant("dQ is scaled twice", "backward_dq", "dq * scale", "dq * scale * scale", "own_scale"),
    Mutant("dout of another layout in memory", "backward_dq", "dout_l, owned", "q_l, owned", "stored_otherwise"),
    Mutant("a key is not seen by its own row", "_add_to_dkv", _VISIBLE_KEYS, _VISIBLE_KEYS.replace("<=", "<"), "causal_ring"),
    Mutant(
        "scores round to the dtype of q", "_add_to_dkv",
        "tl.dot(k, tl.trans(q), input_precision=PRECISION)",
        "tl.dot(k, tl.trans(q), input_precision=PRECISION).to(q.dtype)",
        "large_float16",
    ),
    Mutant("dP rounds to the dtype of q", "_add_to_dkv", _DP_KEYS, f"{_DP_KEYS}.to(q.dtype)", "large_products_float16"),
    Mutant(
        "the unmasked tail is skipped", "backward_dkv",
        "tl.range(split, end, BLOCK_M)",
        "tl.range(end, end, BLOCK_M)",
        "full_ring",
    ),
    Mutant("one query head of the group", "backward_dkv", "tl.range(0, GROUP)", "tl.range(0, 1)", "batches"),
    Mutant(
        "dout lies like q", "backward_dkv",
        "row, split, shift, low, keys, q_l, dout_l",
        "row, split, shift, low, keys, q_l, q_l",
        "stored_otherwise",
    ),
    Mutant("dK is scaled twice", "backward_dkv", "dk * scale", "dk * scale * scale", "own_scale"),
)  # fmt: skip

_HEAD = "first_head + query_head"
_SLOPE = "ds * (1.0 - scores * scores)"
_DROPPED_DP = "tl.where(alive, dp * keep, 0.0)"

SCORES = (
    Mutant("small ones as large ones are", "tanh", "size < 0.625", "size < 0.0", "capped_ring"),
    Mutant("nine rounds", "kept", "tl.static_range(10)", "tl.static_range(9)", "the_same_pairs"),
    Mutant("no cap", "_attend", "tanh(scores * inner)", "scores * inner", "capped_ring"),
    Mutant(
        "the scale once more in the place of the cap", "forward_step",
        "cap if SOFTCAP else scale",
        "scale",
        "capped_full_ring",
    ),
    Mutant(
        "what is dropped is missing in lse", "_attend",
        "p = tl.where(alive, p, 0.0)",
        "total, p = total - tl.sum(tl.where(alive, 0.0, p), 1), tl.where(alive, p, 0.0)",
        "dropping_ring",
    ),
    Mutant("local positions of keys", "_attend", "tl.load(KEYS_AT + keys, mask=inside, other=0)", "keys", "dropping_long_ring"),
    Mutant("heads from 0 on", "forward_step", _HEAD, "query_head", "the_same_pairs"),
    Mutant("no slope", "_add_to_dq", _SLOPE, "ds", "capped_ring"),
    Mutant("dP of what is dropped", "_add_to_dq", _DROPPED_DP, "dp * keep", "dropping_ring"),
    Mutant("heads from 0 on", "backward_dq", _HEAD, "query_head", "the_same_pairs"),
    Mutant("no slope", "_add_to_dkv", _SLOPE, "ds", "capped_ring"),
    Mutant("dV of what is dropped", "_add_to_dkv", "weights = tl.where(alive, p, 0.0)", "weights = p", "dropping_ring"),
    Mutant("heads from 0 on", "backward_dkv", _HEAD, "query_head", "the_same_pairs"),
)  # fmt: skip

WINDOWS = tuple(
    Mutant(
        "a row misses the first key of its window",
        function,
        visible,
        visible.replace(">=", ">"),
        "window_ring",
    )
    for function, visible in (("_attend", _WINDOW), ("_add_to_dq", _WINDOW), ("_add_to_dkv", _WINDOW_KEYS))
)

MUTANTS = FORWARD + BACKWARD + SCORES + WINDOWS
