"""`ringlab simulate` gives JSON, pictures and tables, and refuses what is impossible before it simulates."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ringlab.cli import app
from ringlab.cli.simulate import strip
from ringlab.comm.clocked.log import COMPUTE, WAIT
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.serving import decode_heads_traffic, prefill_traffic
from ringlab.cost.simulate import shown_ranks
from ringlab.cost.simulate_serving import simulate_decode, simulate_prefill
from ringlab.layout import contiguous, zigzag

SIZES = model("llama3-8b").attention()
TOKEN = "--model llama3-8b --tokens 4Ki --ranks 4 --batch 3 --serve decode"
CHUNK = "--model llama3-8b --tokens 256 --prefix 8Ki --ranks 4 --serve prefill"


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *words])


def test_json_holds_what_was_asked_and_what_came_out() -> None:
    result = call("--tokens", "64Ki", "--layout", "contiguous", "--backward", "--slow", "3=1.5", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    for name in ("makespan_s", "exposed_s", "busy_fraction", "wall_s", "peak_bytes"):
        assert isinstance(told[name], (int, float)), name
    assert told["simulated"]["tokens"] == 65536
    assert told["simulated"]["ranks"] == 8  # one node of H100
    assert told["simulated"]["slow"] == {"3": 1.5}
    assert len(told["per_rank"]["busy_s"]) == 8
    assert told["assumptions"]


def test_people_see_a_row_per_rank_and_the_figures() -> None:
    result = call("--tokens", "64Ki", "--layout", "contiguous", "--ranks", "4")
    rows = [line for line in result.stdout.splitlines() if line.startswith("rank ")]
    assert len(rows) == 4
    shares = [row.count("█") for row in rows]
    assert shares == sorted(shares) and shares[0] < shares[3]  # later ranks see more keys
    assert "·" in rows[0] and "·" not in rows[3]
    assert result.stdout.startswith("Makespan ") and "assumed: " not in result.stdout
    detailed = call("--tokens", "64Ki", "--layout", "contiguous", "--ranks", "4", "--details").stdout
    assert rows == [line for line in detailed.splitlines() if line.startswith("rank ")]
    assert all(part in detailed for part in ("bytes sent", "peak memory of a rank", "assumed: "))


def test_files_are_written(tmp_path: Path) -> None:
    names = {kind: tmp_path / f"timeline.{kind}" for kind in ("png", "svg", "json")}
    output = tmp_path / "result.json"
    result = call(
        *("--tokens", "8Ki", "--ranks", "20", "--png", str(names["png"]), "--svg", str(names["svg"])),
        *("--perfetto", str(names["json"]), "--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    assert names["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in names["svg"].read_text()
    events = json.loads(names["json"].read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(shown_ranks(20))
    measured = json.loads(output.read_text())["measured"]
    assert measured["peak_rss_bytes"] > 0 and measured["process_cpu_s"] > 0 and measured["machine"]
    assert "16 of 20 ranks, evenly spread" in result.stdout


def test_shown_ranks_are_spread_evenly_over_all() -> None:
    assert shown_ranks(3) == [0, 1, 2]
    shown = shown_ranks(1024)
    assert len(set(shown)) == 16 and shown[0] == 0 and shown[-1] == 1023


@pytest.mark.parametrize(
    ("words", "told", "nearest"),
    [
        ("--tokens 4 --ranks 8", "at least one token per rank", "4 ranks"),
        ("--ranks 0", "ranks >= 1", "--ranks 1"),
        ("--ranks 9 --nodes 2", "ranks equal to nodes", "--ranks 16"),
        ("--layout dealt", "chunk >= 1", "--chunk"),
        ("--layout zigzag --chunk 3", "dealt only", "--layout dealt"),
        ("--hardware h10", "hardware", "h100"),
        ("--model llama3-71b", "model", "llama3-70b"),
        ("--heads 6 --kv-heads 4", "divisible", "divisor"),
        ("--schedule rin", "one of the schedules", "nearest: ring"),
        ("--layout zigzga", "one of the layouts", "nearest: zigzag"),
        ("--dtype int8", "one of the dtypes", "nearest: float8"),
        ("--tokens 1000000000000000 --ranks 4", "at most 2,147,483,648 tokens", "2147483648 tokens"),
        (
            "--ranks 4097 --tokens 1Mi --backward",
            "at most 4,096 ranks, as every rank's operations are kept",
            "4,096 ranks; or 1,048,832 tokens",
        ),
        ("--batch 99999999999999999999999", "B <= 1,048,576", "1048576"),
        ("--head-dim 1000000 --heads 1000000 --tokens 2G", "fewer than 2^56 elements", "smaller"),
        ("--tile 99999999999999999999999x1", "a tile as rows x keys", "128x128"),
        ("--seed -1 --jitter 0.1", "seed >= 0", "seed 1"),
        ("--slow 3", "rank=factor", "3=1.5"),
        ("--slow 99=2", "slow ranks from 0 to 7", ""),
        ("--jitter -1", "jitter", ""),
    ],
)
def test_the_impossible_is_refused_with_the_constraint_and_the_nearest(
    words: str, told: str, nearest: str
) -> None:
    result = call("--json", *words.split())
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "CostError"
    assert told in error["needed"]
    assert nearest in error["remedy"]


@pytest.mark.parametrize("option", ["--png", "--svg", "--perfetto", "--output"])
def test_files_that_cannot_be_written_are_told_before_anything_is_simulated(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated(*_: object, **__: object) -> None:
        raise AssertionError("simulated before the files were checked")

    monkeypatch.setattr("ringlab.cost.simulate.simulate", simulated)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("precious")
    for path in (Path("/proc/no/x.json"), tmp_path / "folder", tmp_path / "file/below"):
        result = call("--json", "--ranks", "2", option, str(path))
        assert result.exit_code == 1
        error = json.loads(result.stdout)["error"]
        assert error["kind"] == "CostError" and str(path) in error["needed"] and option in error["remedy"]
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("option", ["--png", "--output"])
def test_a_full_disk_is_told(option: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    result = call("--json", "--ranks", "2", "--tokens", "1Ki", option, "/dev/full")
    assert result.exit_code == 1 and json.loads(result.stdout)["error"]["kind"] == "CostError"


def test_masks_and_schedules_are_taken_and_told() -> None:
    words = ("--tokens", "8Ki", "--ranks", "4", "--layout", "per-document", "--documents", "4Ki,3Ki,1Ki")
    result = call(*words, "--window", "512", "--schedule", "hybrid(ring=2, ulysses=2)", "--details")
    assert result.exit_code == 0, result.output
    first = result.stdout.splitlines()[1]
    assert "hybrid(ring=2, ulysses=2)" in first and "window 512" in first and "3 documents" in first
    assert "an all-to-all is one exchange" in result.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--documents", "4Ki,1Ki"), "documents of 8192 tokens in all"),
        (("--window", "0"), "tokens for --window"),
        (("--schedule", "ulysses", "--heads", "6", "--kv-heads", "6"), "heads that the 8 ranks"),
        (("--schedule", "hybrid(ring=3, ulysses=2)"), "8 ranks"),
        (("--schedule", "ring(speed=2)"), "without degrees"),
    ],
    ids=["documents", "window", "heads", "mesh", "degrees"],
)
def test_what_a_mask_or_a_schedule_refuses_is_told(words: tuple[str, ...], told: str) -> None:
    result = call("--tokens", "8Ki", *words, "--json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code != 0 and told in json.dumps(error)


def test_a_long_simulation_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringlab.cost.simulate.CPU_S_PER_PAIR", {False: 10.0, True: 100.0})
    result = call("--tokens", "1Ki", "--ranks", "2", "--backward", "--json")
    assert "may take up to 400 s" in result.stderr and json.loads(result.stdout)["ok"]


@pytest.mark.parametrize(("busy", "mark"), [(0.0, "·"), (0.01, "·"), (0.3, "▒"), (0.7, "█"), (1.0, "█")])
def test_the_mark_of_a_cell_by_how_much_of_it_computes(busy: float, mark: str) -> None:
    """A cell's mark shows which share of its time is computation. Here each cell has ten pairs of computation and wait."""

    class Pairs:
        makespan_s = 4.0

        def strip(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            begins = np.arange(40) / 10
            starts = np.stack([begins, begins + busy / 10], axis=1).ravel()
            return starts, np.tile([COMPUTE, WAIT], 40), np.append(starts[1:], 4.0)

    assert strip(Pairs(), 0, 4) == mark * 4  # type: ignore[arg-type]


def served(words: str) -> dict[str, Any]:
    """Return the JSON that a simulated step of serving prints."""
    result = call(*shlex.split(words), "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if found["ok"] else 1)
    return found


@pytest.mark.parametrize("queries", ["own", "all"])
def test_a_token_of_three_sequences(queries: str) -> None:
    found = served(f"{TOKEN} --queries {queries}")
    run = simulate_decode(SIZES, [4096] * 3, 4, hardware("h100"), queries=queries)
    sent = decode_heads_traffic(replace(SIZES, B=3), 4, queries=queries).total_bytes
    assert found["bytes_sent"] == 4 * sent and found["makespan_s"] == run.makespan_s
    assert queries in found["simulated"]["schedule"] and "pages" in found["simulated"]["layout"]


@pytest.mark.parametrize("travels", ["kv", "q"])
def test_a_chunk_after_a_prefix(travels: str) -> None:
    found = served(f"{CHUNK} --travels {travels}")
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
    error = served(words)["error"]
    assert error["kind"] == "CostError" and needed in error["needed"]
