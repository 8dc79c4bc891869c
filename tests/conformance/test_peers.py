"""Published packages are checked as targets, and their known faults are found.

Some tests need no published package. The others need the package that they check, and show the faults that
the suite finds in it without a hint.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringlab import Mask, oracle, zigzag
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.conformance import peers
from ringlab.conformance.checks.values import rounded_to
from ringlab.conformance.peers import flash_attn, ring_attention_pytorch, ring_flash_attn
from ringlab.conformance.peers.flash_attn import Kernel, _flash_attn_backward, _flash_attn_forward
from ringlab.conformance.peers.peer import Peer
from ringlab.conformance.report.findings import Report
from ringlab.conformance.run.loading import load
from ringlab.conformance.suite import check
from ringlab.conformance.tolerance import Results, bounds, errors, relative_error, truth
from ringlab.errors import BackendError
from tests.conformance.reports import evidence
from tools.conformance import peers as study

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture(params=Kernel)
def kernel(request: pytest.FixtureRequest) -> Any:
    flash_attn.choose(request.param)
    yield request.param
    flash_attn.choose(Kernel.DENSE)


def attention_by_the_stand_in(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, scale: float
) -> Results:
    """Return all results in (B, H, L, D) from the two functions that packages call with (B, L, H, D)."""
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, causal)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    _flash_attn_backward(dout, q, k, v, out, lse, *gradients, 0.0, scale, causal)
    return Results(out.transpose(1, 2), lse, *(x.transpose(1, 2) for x in gradients))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_stand_in_is_attention(kernel: Kernel, causal: bool, dtype: torch.dtype, kv_heads: int) -> None:
    random = torch.Generator().manual_seed(kv_heads)
    shapes = ((2, 4, 20, 16), (2, kv_heads, 20, 16), (2, kv_heads, 20, 16), (2, 4, 20, 16))
    q, k, v, dout = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    found = attention_by_the_stand_in(q, k, v, dout, causal, 16**-0.5)
    assert {x.dtype for x in (found.out, found.dq, found.dk, found.dv)} == {dtype}
    assert found.lse.dtype == torch.float32 and found.lse.shape == (2, 4, 20)
    true = truth(q, k, v, dout, causal=causal)
    allowed = bounds(q, k, v, dout, causal=causal, true=true)
    assert {name: e for name, e in errors(found, true).items() if not e <= allowed[name]} == {}


@pytest.mark.parametrize(("rows", "keys"), [(3, 7), (7, 3)])
def test_a_causal_mask_is_aligned_to_the_bottom_right(kernel: Kernel, rows: int, keys: int) -> None:
    """The last row sees all keys. First rows that see no key have out 0, lse +∞ and no gradient."""
    random = torch.Generator().manual_seed(rows)
    q, dout = torch.randn(2, 1, 1, rows, 8, generator=random)
    k, v = torch.randn(2, 1, 1, keys, 8, generator=random)
    found = attention_by_the_stand_in(q, k, v, dout, True, 0.5)
    blind = max(0, rows - keys)
    square = [
        torch.cat([torch.zeros(1, 1, max(0, keys - rows), 8), x[:, :, blind:]], dim=2) for x in (q, dout)
    ]
    problem = square[0], k, v, square[1]
    true = truth(*problem, causal=True, scale=0.5)
    allowed = bounds(*problem, causal=True, scale=0.5, true=true)
    count = rows - blind
    for name in ("out", "dq"):
        ours, right = getattr(found, name)[:, :, blind:], getattr(true, name)[:, :, -count:]
        assert (
            np.abs(ours.double().numpy() - right).max() <= allowed[name] * np.abs(getattr(true, name)).max()
        )
    for name in ("dk", "dv"):
        assert relative_error(getattr(found, name), getattr(true, name)) <= allowed[name]
    assert (found.lse[..., :blind] == torch.inf).all() and torch.isfinite(found.lse[..., blind:]).all()
    assert not found.out[:, :, :blind].any() and not found.dq[:, :, :blind].any()


def test_packed_documents_of_the_stand_in_do_not_see_each_other() -> None:
    """Packed documents, one of which is empty, do not see each other."""
    documents, scale = (5, 0, 7), 8**-0.5
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(12, heads, 8, generator=random) for heads in (4, 2, 2, 4))
    ends = torch.tensor((0, 5, 5, 12), dtype=torch.int32)
    packed = ends, ends, 7, 7, 0.0, scale, True
    out, lse, *_ = flash_attn._flash_attn_varlen_forward(q, k, v, *packed)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flash_attn._flash_attn_varlen_backward(dout, q, k, v, out, lse, *gradients, *packed)
    problem = [x.transpose(0, 1)[None] for x in (q, k, v, dout)]
    mask = Mask(documents=documents)
    true = truth(*problem, mask=mask)
    found = Results(out.transpose(0, 1)[None], lse[None], *(x.transpose(0, 1)[None] for x in gradients))
    allowed = bounds(*problem, mask=mask, true=true)
    assert {name: e for name, e in errors(found, true).items() if not e <= allowed[name]} == {}


@pytest.mark.parametrize(
    "asked", [{"window_size_left": 4}, {"softcap": 1.0}, {"alibi_slopes": torch.ones(1)}]
)
def test_what_the_stand_in_does_not_compute_it_refuses(asked: dict[str, Any]) -> None:
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(BackendError, match="without dropout"):
        _flash_attn_forward(x, x, x, 0.0, 1.0, False, **asked)


def test_flash_attn_is_replaced_for_the_time_of_an_import_only() -> None:
    before = sys.modules.get("flash_attn")
    with flash_attn.in_place_of_flash_attn():
        from importlib import import_module

        interface = import_module("flash_attn.flash_attn_interface")
        assert interface._flash_attn_forward is _flash_attn_forward
        with pytest.raises(BackendError, match="another function of flash-attn"):
            import_module("flash_attn").flash_attn_func()
    assert sys.modules.get("flash_attn") is before


def no_package(name: str) -> Any:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.pinned])
def test_a_missing_package_is_told_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", no_package)
    with pytest.raises(BackendError) as raised:
        load(f"peer:{name}")
    peer = peers.PEERS[name]
    assert peer.package in raised.value.needed and raised.value.got == "it is not installed"
    assert f"pip install '{peer.package}=={peer.pinned}'" in raised.value.remedy
    assert ".[peers]" in raised.value.remedy


def test_a_report_says_what_to_install() -> None:
    """The first finding of a report says what to install, and nothing is run."""
    report = check("tests.conformance.bad_targets:of_an_absent_package", quick=True, only=("forward",))
    assert report.failed == ["loads", "forward"] and report.runs == 0
    assert "pip install 'ringlab-no-such-package==1.0'" in report.findings[0].evidence


def test_an_unknown_peer_names_those_there_are() -> None:
    with pytest.raises(BackendError, match="ring-attention-pytorch, ring-flash-attn"):
        load("peer:no-such-peer")


def test_the_pins_are_those_of_the_extra() -> None:
    pinned = {f"{peer.package}=={peer.pinned}" for peer in peers.PEERS.values() if peer.pinned}
    assert pinned == set(PROJECT["optional-dependencies"]["peers"])
    (included,) = [line for line in PROJECT["optional-dependencies"]["test"] if line.startswith("ringlab[")]
    assert "peers" in included.removeprefix("ringlab[").removesuffix("]").split(",")


def test_a_target_says_package_version_and_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    made = ring_flash_attn.of(lambda q, k, v: q, "zigzag")
    peer = Peer("made-up", "made-up-package", "9.9", lambda: made, "a stand-in")
    claims = peer.target().claims()
    assert claims.name == "made-up-package 9.9 (made-up; kernel: a stand-in)"
    assert (claims.layouts, claims.causal, claims.over) == (("zigzag",), (True,), "torch.distributed")


def test_functions_like_flash_attns_are_called_by_name() -> None:
    given: dict[str, Any] = {}

    def function(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        given.update(named)
        return q, torch.zeros(2, 4, 8), None

    target = ring_flash_attn.of(function, "contiguous", extra=1)
    x = torch.randn(2, 8, 4, 16)
    out, lse = target.function(x, x, x, causal=True, scale=None, group="the group")
    assert out is x and lse.shape == (2, 4, 8)
    assert given == {
        "softmax_scale": None, "causal": True, "return_attn_probs": True, "group": "the group", "extra": 1,
    }  # fmt: skip


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_heads_are_put_in_the_packages_order_and_back(kv_heads: int) -> None:
    """Heads are put into a package's order and back, for a package that pairs heads in turn."""
    given: dict[str, Any] = {}

    def theirs(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        given.update(named)
        order = [head % kv_heads for head in range(q.shape[2])]
        first = (x.transpose(1, 2) for x in (q, k[:, :, order], v[:, :, order]))
        return torch.nn.functional.scaled_dot_product_attention(*first).transpose(1, 2)

    q, k, v = (torch.randn(1, 10, heads, 8) for heads in (6, kv_heads, kv_heads))
    attend = ring_attention_pytorch.attend_with(theirs)
    out = attend(q, k, v, causal=True, layout=zigzag(10, 1), world_size=3)
    right = oracle.attention(*(x.transpose(1, 2) for x in (q, k, v))).out
    torch.testing.assert_close(out.transpose(1, 2).double(), torch.from_numpy(right), atol=1e-5, rtol=1e-5)
    assert given == {"causal": True, "ring_reduce_col": True, "striped_ring_attn": False, "ring_size": 3}


def test_a_module_is_found_without_its_packages_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made_up_rings"
    folder.mkdir()
    (folder / "__init__.py").write_text("import no_such_module_anywhere\n")
    (folder / "rings.py").write_text(
        "from flash_attn.flash_attn_interface import _flash_attn_forward\n"
        "def ring(q, k, v, softmax_scale, causal, return_attn_probs, group):\n"
        "    return _flash_attn_forward(q, k, v, 0.0, 0.25, causal)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ring_flash_attn, "PACKAGE", "made_up_rings")
    try:
        target = ring_flash_attn.make("rings", "ring", "contiguous")
        x = torch.randn(1, 6, 2, 16)
        out, lse = target.function(x, x, x, causal=True, scale=None, group=None)
        assert out.shape == x.shape and lse.shape == (1, 2, 6)
    finally:
        for name in ("made_up_rings", "made_up_rings.rings"):
            sys.modules.pop(name, None)


def test_digits_tell_what_a_result_was_rounded_to() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, 50, generator=random, dtype=torch.float64)
    assert rounded_to(x.numpy(), "float64") is None
    assert rounded_to(x.float().double().numpy(), "float64") == "float32"
    assert rounded_to(x.float().double().numpy(), "float32") is None
    assert rounded_to(x.half().double().numpy(), "float32") == "float16"
    assert rounded_to(x.bfloat16().double().numpy(), "float32") == "bfloat16"
    assert rounded_to(x.bfloat16().half().double().numpy(), "float16") == "bfloat16"
    assert rounded_to(x.half().double().numpy(), "float16") is None
    assert rounded_to(x.bfloat16().double().numpy(), "bfloat16") is None


def test_too_few_numbers_say_nothing_about_digits() -> None:
    few = torch.randn(31, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    assert rounded_to(few.numpy(), "float32") is None
    assert rounded_to(torch.zeros(100).double().numpy(), "float32") is None
    assert rounded_to(torch.full((100,), 0.5).double().numpy(), "float32") is None
    mixed = torch.cat([few.repeat(3), torch.tensor([1.0 + 2.0**-23]).double()])
    assert rounded_to(mixed.numpy(), "float32") is None


def test_the_page_is_made_of_the_committed_file() -> None:
    checkout = Path(__file__).resolve().parents[2]
    of = study.read(checkout / "benchmarks" / "results" / "conformance" / "peers.json")
    found = [of[name] for name in study.STUDIES if name in of]
    assert {"ring-attention-pytorch", "ring-flash-attn", "torch-context-parallel"} <= {
        e["study"] for e in found
    }
    assert (checkout / "docs" / "peers.md").read_text(encoding="utf-8") == study.page(found)
    for each in found:
        assert each["version"] == (peers.PEERS[each["peer"]].pinned or each["torch"])


def needs(name: str) -> pytest.MarkDecorator:
    """Skip if the peer's package is not installed, with the install command as the reason."""
    try:
        version = peers.peer(name).version
    except BackendError as error:
        return pytest.mark.skipif(True, reason=f"needs {error.needed}: {error.remedy}")
    pinned = peers.peer(name).pinned
    return pytest.mark.skipif(
        bool(pinned) and version != pinned, reason=f"found about {pinned}, installed is {version}"
    )


def report(name: str, **claims: Any) -> Report:
    """Return the report about a peer on two processes, by checks of forward, gradients and precision."""
    only = ("forward", "dq", "dk", "dv", "precision")
    return check(f"peer:{name}", quick=True, limit=60.0, ranks=(2,), only=only, **claims)


@pytest.mark.thorough
@pytest.mark.slow
@needs("ring-attention-pytorch")
def test_wrong_gradients_of_k_and_v_are_found() -> None:
    found = report("ring-attention-pytorch")
    assert found.failed == ["dk", "dv"]
    assert evidence(found, "loads").startswith("ring-attention-pytorch 0.5.20 (")
    assert evidence(found, "dk").startswith("dk wrong in 1 of 1 runs")


@pytest.mark.thorough
@pytest.mark.slow
@needs("ring-flash-attn")
def test_dq_rounded_to_bfloat16_and_a_sum_in_a_scratch_buffer_are_found() -> None:
    """The rounding is found in float16, and the scratch buffer in float32, where dq is summed wrongly.

    In float32, `.to(float32)` copies nothing. The sums of dK and dV also alias the scratch buffer. Whether
    they are wrong depends on whether they were sent before the buffer was written again.
    """
    found = report("ring-flash-attn", dtypes=("float16", "float32"))
    assert {"dq", "precision"} <= set(found.failed) <= {"dq", "dk", "dv", "precision"}
    assert evidence(found, "precision").startswith("dq is float16, and every number of it is one of bfloat16")
    assert "float32" in evidence(found, "dq")
    assert "kernel: a stand-in" in evidence(found, "loads")


@pytest.mark.thorough
@pytest.mark.slow
def test_torchs_own_ring_is_right() -> None:
    assert report("torch-context-parallel").failed == []


def _public(ring: Ring) -> str:
    target = peers.torch_context_parallel.public()
    x = torch.randn(1, 2, 8, 16)
    try:
        target.function(x, x, x, causal=True, world_size=ring.world_size)
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.thorough
@pytest.mark.slow
def test_torchs_public_function_does_not_run_on_a_cpu() -> None:
    told = launch(_public, 1, timeout=60.0, memory=False).results
    assert all("_scaled_dot_product_flash_attention_for_cpu" in each for each in told)
