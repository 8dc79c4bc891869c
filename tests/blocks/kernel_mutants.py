"""Wrong kernels, each by one small change of the right ones' text, and the check in which it dies.

A mutant names the function whose text is changed; what is replaced stands there exactly once.
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
    "addressing.py": "from ringlab.blocks.triton.addressing import places, tile\n",
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
    """Return the text of the kernels in which the functions that they import stand before their own."""
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
    """Return a module of kernels with this text; the interpreter reads it from a file."""
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
    Mutant("a row sees the key after its own", "_attend", _VISIBLE, f"{_VISIBLE} + 1", "causal_ring"),
    Mutant("keys after the ragged end count", "_attend", "inside[None, :] & ", "", "full_ring"),
    Mutant("scores round to the dtype of q", "_attend", _QK, f"{_QK}.to(q.dtype)", "large_float16"),
    Mutant(
        "scores round to the dtype of q, a little", "_attend", _QK, f"{_QK}.to(q.dtype)", "exact_scores"
    ),
    Mutant("the sum of values is not rescaled", "_attend", "acc * decay[:, None]", "acc", "full_ring"),
    Mutant("the sum of weights is not rescaled", "_attend", "total * decay", "total", "full_ring"),
    Mutant("the old maximum is kept", "_attend", "return acc, m_new, total", "return acc, m, total", "full_ring"),
    Mutant("−inf − (−inf)", "_attend", 'tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new", "rows_that_see_nothing"),
    Mutant("unmasked tiles are not scaled", "_attend", "factor = unit", "factor = 1.0", "full_ring"),
    Mutant("masked tiles are scaled twice", "_attend", "factor = 1.0", "factor = unit", "own_scale"),
    Mutant("e instead of 2", "_attend", "tl.math.exp2(scores", "tl.math.exp(scores", "causal_ring"),
    Mutant("a step forgets the carried state", "forward_step", "if FIRST:", "if True:", "full_ring"),
    Mutant(
        "the carried maximum is stale", "forward_step",
        "tl.store(M + state + rows, m, mask=owned)",
        "if FIRST:\n            tl.store(M + state + rows, m, mask=owned)",
        "full_ring",
    ),
    Mutant(
        "the carried sum is stale", "forward_step",
        "tl.store(TOTAL + state + rows, total, mask=owned)",
        "if FIRST:\n            tl.store(TOTAL + state + rows, total, mask=owned)",
        "full_ring",
    ),
    Mutant("the carried sum of values is rounded", "forward_step", _CARRIED, f"{_CARRIED}{_ROUND}", "carried_in_float32"),
    Mutant(
        "the carried maximum is rounded", "forward_step",
        "m = tl.load(M + state + rows, mask=owned, other=-float(\"inf\"))",
        f"m = tl.load(M + state + rows, mask=owned, other=-float(\"inf\")){_ROUND}",
        "carried_in_float32",
    ),
    Mutant(
        "the carried sum of weights is rounded", "forward_step",
        "tl.load(TOTAL + state + rows, mask=owned, other=0.0)",
        f"tl.load(TOTAL + state + rows, mask=owned, other=0.0){_ROUND}",
        "carried_in_float32",
    ),
    Mutant(
        "the ragged tail is skipped", "forward_step",
        "tl.range(split, end, BLOCK_N)",
        "tl.range(split, end - BLOCK_N + 1, BLOCK_N)",
        "full_ring",
    ),
    Mutant(
        "the unmasked tiles are skipped", "forward_step",
        "tl.range(begin, split, BLOCK_N)",
        "tl.range(split, split, BLOCK_N)",
        "full_ring",
    ),
    Mutant(
        "keys of another head", "forward_step",
        "K + batch * k_b + tl.cast(query_head // GROUP, tl.int64)",
        "K + batch * k_b + tl.cast(query_head % GROUP, tl.int64)",
        "batches",
    ),
    Mutant(
        "values of another head", "forward_step",
        "V + batch * v_b + tl.cast(query_head // GROUP, tl.int64)",
        "V + batch * v_b + tl.cast(query_head % GROUP, tl.int64)",
        "batches",
    ),
    Mutant("keys of another batch", "forward_step", "K + batch * k_b", "K", "batches"),
    Mutant(
        "tokens lie head dim after head dim", "forward_step",
        "q = tile(q_base, row, q_l,",
        "q = tile(q_base, row, HEAD_DIM,",
        "stored_otherwise",
    ),
    Mutant("values lie like keys", "forward_step", "V + batch * v_b", "V + batch * k_b", "stored_otherwise"),
    Mutant("the sign of the scale is lost", "forward_step", "if NEGATIVE:", "if False:", "own_scale"),
    Mutant(
        "the scale is folded into q", "forward_step",
        "    if NEGATIVE:",
        "    q, scale = (q * scale).to(q.dtype), 1.0\n    if NEGATIVE:",
        "exact_scores",
    ),
    Mutant("lse in units of log 2", "forward_step", " * 0.6931471805599453", "", "causal_ring"),
    Mutant("lse without the maximum", "forward_step", "(m + tl.math.log2(total))", "tl.math.log2(total)", "causal_ring"),
    Mutant("out is not normalized", "forward_step", "acc / total[:, None]", "acc", "causal_ring"),
    Mutant(
        "0 / 0 in a row that saw nothing", "forward_step",
        "total = tl.where(unseen, 1.0, total)",
        "total = total",
        "rows_that_see_nothing",
    ),
    Mutant(
        "a row that saw nothing has a finite lse", "forward_step",
        'tl.where(unseen, -float("inf"), (m',
        'tl.where(unseen, 0.0, (m',
        "rows_that_see_nothing",
    ),
    Mutant(
        "rows that saw nothing are not written", "forward_step",
        "out.to(OUT.dtype.element_ty), mask=deep",
        "out.to(OUT.dtype.element_ty), mask=deep & ~unseen[:, None]",
        "rows_that_see_nothing",
    ),
    Mutant(
        "the last row of a program is not written", "forward_step",
        "tl.store(LSE + state + rows, lse, mask=owned)",
        "tl.store(LSE + state + rows, lse, mask=rows < row_stop - 1)",
        "causal_ring",
    ),
    Mutant(
        "values have as many dims as keys", "_attend",
        "BLOCK_N, VALUE_DIM, BLOCK_V",
        "BLOCK_N, HEAD_DIM, BLOCK_V",
        "full_ring",
    ),
    Mutant("carried rows lie as far apart as rows of q", "forward_step", _CARRIED, _CARRIED.replace("VALUE_DIM, owned", "HEAD_DIM, owned"), "full_ring"),
    Mutant("out has the dims of q", "forward_step", "BLOCK_M, VALUE_DIM, BLOCK_V)", "BLOCK_M, HEAD_DIM, BLOCK_V)", "full_ring"),
    Mutant(
        "masked numbers are not given", "tile",
        "tl.load(pointers, mask=within[:, None] & deep, other=0.0)",
        "tl.load(pointers, mask=within[:, None] & deep)",
        "causal_ring",
    ),
)  # fmt: skip

BACKWARD = (
    Mutant("a row does not see its own key", "_add_to_dq", _VISIBLE, _VISIBLE.replace("<=", "<"), "causal_ring"),
    Mutant("a row sees the key after its own", "_add_to_dq", _VISIBLE, f"{_VISIBLE} + 1", "causal_ring"),
    Mutant("nothing is masked", "_add_to_dq", "tl.where(visible, p, 0.0)", "p", "causal_ring"),
    Mutant("delta is forgotten", "_add_to_dq", "dp - delta[:, None]", "dp", "causal_ring"),
    Mutant("delta is added", "_add_to_dq", "dp - delta[:, None]", "dp + delta[:, None]", "causal_ring"),
    Mutant("delta of this block alone", "_add_to_dq", "dp - delta[:, None]", "dp - tl.sum(p * dp, 1)[:, None]", "causal_ring"),
    Mutant("P instead of dS", "_add_to_dq", "ds = p * (dp - delta[:, None])", "ds = p", "causal_ring"),
    Mutant("scores round to the dtype of q", "_add_to_dq", _QK, f"{_QK}.to(q.dtype)", "large_float16"),
    Mutant("lse is taken for units of log 2", "_log2", "lse * 1.4426950408889634", "lse", "causal_ring"),
    Mutant("a step forgets the sum", "backward_dq", "if FIRST:", "if True:", "full_ring"),
    Mutant("the carried sum is rounded", "backward_dq", _CARRIED_DQ, f"{_CARRIED_DQ}{_ROUND}", "carried_in_float32"),
    Mutant("dP rounds to the dtype of q", "_add_to_dq", _DP, f"{_DP}.to(q.dtype)", "large_products_float16"),
    Mutant(
        "the ragged tail is skipped", "backward_dq",
        "tl.range(split, end, BLOCK_N)",
        "tl.range(split, end - BLOCK_N + 1, BLOCK_N)",
        "full_ring",
    ),
    Mutant(
        "the unmasked tiles are skipped", "backward_dq",
        "tl.range(begin, split, BLOCK_N)",
        "tl.range(split, split, BLOCK_N)",
        "full_ring",
    ),
    Mutant("keys and values of another head", "backward_dq", "query_head // GROUP", "query_head % GROUP", "batches"),
    Mutant("dQ is scaled twice", "backward_dq", "dq * scale", "dq * scale * scale", "own_scale"),
    Mutant("dQ is not scaled", "backward_dq", "(dq * scale)", "dq", "own_scale"),
    Mutant("dout of another layout in memory", "backward_dq", "dout_l, owned", "q_l, owned", "stored_otherwise"),
    Mutant(
        "the last row of a program is not written", "backward_dq",
        "places(row, owned,",
        "places(row, rows < row_stop - 1,",
        "causal_ring",
    ),
    Mutant("a key is not seen by its own row", "_add_to_dkv", _VISIBLE_KEYS, _VISIBLE_KEYS.replace("<=", "<"), "causal_ring"),
    Mutant("a key is seen by the row before", "_add_to_dkv", _VISIBLE_KEYS, f"{_VISIBLE_KEYS} + 1", "causal_ring"),
    Mutant("nothing is masked", "_add_to_dkv", "tl.where(visible, p, 0.0)", "p", "causal_ring"),
    Mutant(
        "scores round to the dtype of q", "_add_to_dkv",
        "tl.dot(k, tl.trans(q), input_precision=PRECISION)",
        "tl.dot(k, tl.trans(q), input_precision=PRECISION).to(q.dtype)",
        "large_float16",
    ),
    Mutant("dP rounds to the dtype of q", "_add_to_dkv", _DP_KEYS, f"{_DP_KEYS}.to(q.dtype)", "large_products_float16"),
    Mutant("delta is forgotten", "_add_to_dkv", "dp - delta[None, :]", "dp", "causal_ring"),
    Mutant("dV from dS", "_add_to_dkv", "dv = tl.dot(weights.to", "dv = tl.dot((p * scores).to", "causal_ring"),
    Mutant(
        "the masked head is skipped", "backward_dkv",
        "tl.range(begin, split, BLOCK_M)",
        "tl.range(split, split, BLOCK_M)",
        "causal_ring",
    ),
    Mutant(
        "the unmasked tail is skipped", "backward_dkv",
        "tl.range(split, end, BLOCK_M)",
        "tl.range(end, end, BLOCK_M)",
        "full_ring",
    ),
    Mutant("the masked head runs into the tail", "backward_dkv", "row, split, shift", "row, end, shift", "causal_ring"),
    Mutant("one query head of the group", "backward_dkv", "tl.range(0, GROUP)", "tl.range(0, 1)", "batches"),
    Mutant(
        "query heads of another group", "backward_dkv",
        "key_head * GROUP + member",
        "key_head + member * key_heads",
        "batches",
    ),
    Mutant("lse of another batch", "backward_dkv", "LSE + (batch * H + query_head)", "LSE + query_head", "batches"),
    Mutant(
        "dout lies like q", "backward_dkv",
        "row, split, shift, low, keys, q_l, dout_l",
        "row, split, shift, low, keys, q_l, q_l",
        "stored_otherwise",
    ),
    Mutant("dK is scaled twice", "backward_dkv", "dk * scale", "dk * scale * scale", "own_scale"),
    Mutant("dout has the dims of q", "backward_dq", "owned, BLOCK_M, VALUE_DIM, BLOCK_V", "owned, BLOCK_M, HEAD_DIM, BLOCK_V", "full_ring"),
    Mutant("dV has the dims of dK", "backward_dkv", "places(first, owned, BLOCK_N, VALUE_DIM,", "places(first, owned, BLOCK_N, HEAD_DIM,", "full_ring"),
    Mutant(
        "the last key of a program is not written", "backward_dkv",
        "places(first, owned, BLOCK_N, HEAD_DIM,",
        "places(first, keys < key_stop - 1, BLOCK_N, HEAD_DIM,",
        "causal_ring",
    ),
)  # fmt: skip

_DRAW = "kept(keys_at[None, :], rows_at[:, None], draw)"
_DRAW_KEYS = "kept(keys_at[:, None], rows_at[None, :], draw)"
_HEAD = "first_head + query_head"
_INNER = "inner, unit = scale / cap"
_SLOPE = "ds * (1.0 - scores * scores)"
_DROPPED_DP = "tl.where(alive, dp * keep, 0.0)"

SCORES = (
    Mutant("small ones as large ones are", "tanh", "size < 0.625", "size < 0.0", "capped_ring"),
    Mutant("the sign is lost", "tanh", "tl.where(x < 0.0, -large, large)", "large", "capped_ring"),
    Mutant("e^x in the place of e^2x", "tanh", "2.8853900817779268", "1.4426950408889634", "capped_ring"),
    Mutant("nine rounds", "kept", "tl.static_range(10)", "tl.static_range(9)", "the_same_pairs"),
    Mutant("rows and keys change places", "kept", "c0, c1 = keys_at", "c1, c0 = keys_at", "the_same_pairs"),
    Mutant("the seed's halves change places", "kept", "k0, k1 = seed_low", "k1, k0 = seed_low", "the_same_pairs"),
    Mutant("one increment for both halves", "kept", "0xBB67AE85", "0x9E3779B9", "the_same_pairs"),
    Mutant("one multiplier for both words", "kept", "umulhi(a, 0xD2511F53)", "umulhi(a, 0xCD9E8D57)", "the_same_pairs"),
    Mutant("heads draw by twos", "kept", "lane = head % 4", "lane = head % 2", "the_same_pairs"),
    Mutant("heads draw as those four before", "kept", "(head // 4)", "(head * 0)", "the_same_pairs"),
    Mutant("words have a sign", "kept", "word > dropped.to(tl.uint32)", "word.to(tl.int32) > dropped", "the_same_pairs"),
    Mutant("what is dropped is kept", "kept", "word > dropped", "word < dropped", "the_same_pairs"),
    Mutant("no cap", "_attend", "tanh(scores * inner)", "scores * inner", "capped_ring"),
    Mutant(
        "the cap after the mask", "_attend",
        'tl.where(visible, scores * unit, -float("inf"))',
        "tl.where(visible, scores, -1.0) * unit",
        "capped_ring",
    ),
    Mutant("the cap before the scale", "forward_step", "scale / cap", "1.0 / cap", "capped_ring"),
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
    Mutant(
        "local positions of rows", "forward_step",
        "tl.load(ROWS_AT + rows, mask=owned, other=0) if DROPOUT else rows",
        "rows",
        "dropping_long_ring",
    ),
    Mutant("what is kept is not divided", "forward_step", "acc * keep", "acc", "dropping_ring"),
    Mutant(
        "divided in every step", "forward_step",
        "if NEGATIVE:",
        "if DROPOUT:\n        keep = keep * keep\n    if NEGATIVE:",
        "dropping_ring",
    ),
    Mutant("heads from 0 on", "forward_step", _HEAD, "query_head", "the_same_pairs"),
    Mutant("batches draw alike", "forward_step", "draw = (batch,", "draw = (batch * 0,", "dropping_ring"),
    Mutant("no slope", "_add_to_dq", _SLOPE, "ds", "capped_ring"),
    Mutant("the slope of another function", "_add_to_dq", _SLOPE, "ds * (1.0 - scores)", "capped_ring"),
    Mutant("no cap", "_add_to_dq", "tanh(scores * inner)", "scores * inner", "capped_ring"),
    Mutant("the cap before the scale", "backward_dq", _INNER, "inner, unit = 1.0 / cap", "capped_ring"),
    Mutant("dP of what is dropped", "_add_to_dq", _DROPPED_DP, "dp * keep", "dropping_ring"),
    Mutant("dP is not divided", "_add_to_dq", _DROPPED_DP, "tl.where(alive, dp, 0.0)", "dropping_ring"),
    Mutant("delta of what is dropped is missing", "_add_to_dq", "ds = p *", "ds = tl.where(alive, p, 0.0) *", "dropping_ring"),
    Mutant(
        "another counter than forward", "_add_to_dq",
        _DRAW,
        "kept(rows_at[:, None], keys_at[None, :], draw)",
        "dropping_ring",
    ),
    Mutant("heads from 0 on", "backward_dq", _HEAD, "query_head", "the_same_pairs"),
    Mutant("no slope", "_add_to_dkv", _SLOPE, "ds", "capped_ring"),
    Mutant("no cap", "_add_to_dkv", "tanh(scores * inner)", "scores * inner", "capped_ring"),
    Mutant("the cap before the scale", "backward_dkv", _INNER, "inner, unit = 1.0 / cap", "capped_ring"),
    Mutant("dV of what is dropped", "_add_to_dkv", "weights = tl.where(alive, p, 0.0)", "weights = p", "dropping_ring"),
    Mutant("dP of what is dropped", "_add_to_dkv", _DROPPED_DP, "dp * keep", "dropping_ring"),
    Mutant("dP is not divided", "_add_to_dkv", _DROPPED_DP, "tl.where(alive, dp, 0.0)", "dropping_ring"),
    Mutant("delta of what is dropped is missing", "_add_to_dkv", "ds = p *", "ds = weights *", "dropping_ring"),
    Mutant(
        "another counter than forward", "_add_to_dkv",
        _DRAW_KEYS,
        "kept(rows_at[None, :], keys_at[:, None], draw)",
        "dropping_ring",
    ),
    Mutant("dV is not divided", "backward_dkv", "dv * keep if DROPOUT else dv", "dv", "dropping_ring"),
    Mutant("heads from 0 on", "backward_dkv", _HEAD, "query_head", "the_same_pairs"),
    Mutant("heads of the group draw alike", "backward_dkv", _HEAD, "first_head + key_head * GROUP", "dropping_ring"),
)  # fmt: skip

_LOW = "tl.load(LOWS + segment)"

WINDOWS = tuple(
    Mutant(name, function, old, new, "window_ring")
    for kernel, helper, visible in (
        ("forward_step", "_attend", _WINDOW),
        ("backward_dq", "_add_to_dq", _WINDOW),
        ("backward_dkv", "_add_to_dkv", _WINDOW_KEYS),
    )
    for name, function, old, new in (
        ("a row misses the first key of its window", helper, visible, visible.replace(">=", ">")),
        ("a row sees the key before its window", helper, visible, f"{visible} - 1"),
        ("windows have no left edge", helper, "if WINDOW:", "if False:"),
        ("all segments have the left edge of the first", kernel, _LOW, "tl.load(LOWS)"),
    )
)

MUTANTS = FORWARD + BACKWARD + SCORES + WINDOWS
