"""`ringlab simulate --serve`: the figures of the serving programs, and options that do not belong together."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.serving import decode_heads_traffic, prefill_traffic
from ringlab.cost.simulate_serving import simulate_decode, simulate_prefill
from ringlab.layout import contiguous, zigzag

SIZES = model("llama3-8b").attention()
TOKEN = "--model llama3-8b --tokens 4Ki --ranks 4 --batch 3 --serve decode"
CHUNK = "--model llama3-8b --tokens 256 --prefix 8Ki --ranks 4 --serve prefill"


def told(words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *shlex.split(words), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if found["ok"] else 1)
    return found


@pytest.mark.parametrize("queries", ["own", "all"])
def test_a_token_of_three_sequences(queries: str) -> None:
    found = told(f"{TOKEN} --queries {queries}")
    run = simulate_decode(SIZES, [4096] * 3, 4, hardware("h100"), queries=queries)
    sent = decode_heads_traffic(replace(SIZES, B=3), 4, queries=queries).total_bytes
    assert found["bytes_sent"] == 4 * sent and found["makespan_s"] == run.makespan_s
    assert queries in found["simulated"]["schedule"] and "pages" in found["simulated"]["layout"]


@pytest.mark.parametrize("travels", ["kv", "q"])
def test_a_chunk_after_a_prefix(travels: str) -> None:
    found = told(f"{CHUNK} --travels {travels}")
    run = simulate_prefill(SIZES, 8192, 256, 4, hardware("h100"), travels=travels)
    cached, layout = contiguous(8192, 4).lengths, zigzag(256, 4)
    sent = [prefill_traffic(SIZES, layout, cached, travels=travels, rank=r).total_bytes for r in range(4)]
    assert found["bytes_sent"] == sum(sent) and found["makespan_s"] == run.makespan_s


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (f"{TOKEN} --prefix 1Ki", "--serve prefill"),
        (f"{TOKEN} --travels q", "--serve prefill"),
        (f"{CHUNK} --queries all", "--serve decode"),
        (f"{CHUNK} --backward", "--serve without"),
        (f"{TOKEN} --window 128", "--serve without"),
        (f"{TOKEN} --slow 1=2", "--serve without"),
        (f"{CHUNK} --schedule burst", "--serve without"),
        (TOKEN.replace("decode", "decod"), "step among"),
        (f"{CHUNK} --travels v", "travels among"),
        ("--tokens 4Ki --prefix 1Ki", "with --serve"),
        ("--tokens 4Ki --queries all", "with --serve"),
    ],
)
def test_options_that_do_not_belong_together(words: str, needed: str) -> None:
    error = told(words)["error"]
    assert error["kind"] == "CostError" and needed in error["needed"]
