"""Known packages as they are: what the suite finds about them without being told. Each needs its package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.conformance import peers
from ringlab.conformance.runner import Report, check
from ringlab.errors import BackendError


def needs(name: str) -> pytest.MarkDecorator:
    """Skip where the peer's package is not installed, with the command as the reason."""
    try:
        version = peers.peer(name).version
    except BackendError as error:
        return pytest.mark.skipif(True, reason=f"needs {error.needed}: {error.remedy}")
    pinned = peers.peer(name).pinned
    return pytest.mark.skipif(
        bool(pinned) and version != pinned, reason=f"found about {pinned}, installed is {version}"
    )


def report(name: str, **claims: Any) -> Report:
    """The checks that say most, on two processes."""
    only = ("forward", "dq", "dk", "dv", "precision")
    return check(f"peer:{name}", quick=True, limit=60.0, ranks=(2,), only=only, **claims)


def evidence(report: Report, name: str) -> str:
    return next(finding.evidence for finding in report.findings if finding.name == name)


@pytest.mark.slow
@needs("ring-attention-pytorch")
def test_wrong_gradients_of_k_and_v_are_found() -> None:
    found = report("ring-attention-pytorch")
    assert found.failed == ["dk", "dv"]
    assert evidence(found, "loads").startswith("ring-attention-pytorch 0.5.20 (")
    assert evidence(found, "dk").startswith("dk wrong in 1 of 1 runs")


@pytest.mark.slow
@needs("ring-flash-attn")
def test_dq_rounded_to_bfloat16_and_a_sum_in_a_scratch_buffer_are_found() -> None:
    """The first in float16. The second in float32, where `.to(float32)` copies nothing: the sums of dq, dk and dv."""
    found = report("ring-flash-attn", dtypes=("float16", "float32"))
    assert found.failed == ["dq", "dk", "dv", "precision"]
    assert evidence(found, "precision").startswith("dq is float16, and every number of it is one of bfloat16")
    assert "float32" in evidence(found, "dk")
    assert "kernel: a stand-in" in evidence(found, "loads")


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


@pytest.mark.slow
def test_torchs_public_function_does_not_run_on_a_cpu() -> None:
    told = launch(_public, 1, timeout=60.0, memory=False).results
    assert all("_scaled_dot_product_flash_attention_for_cpu" in each for each in told)
