"""`ringlab plan` prints its answer first, writes complete JSON, explains bad input, and imports no torch."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab.cost.hardware import hardware, hardware_names, write_hardware
from ringlab.cost.models import model_names
from ringlab.cost.planner.serve_time import ServeRequest, serve_time
from ringlab.cost.traffic import RINGS

ASKED = "--model llama3-70b --tokens 1M --hardware h100"
FITS = f"{ASKED} --nodes 8 --logits-chunk 4Ki"
SERVE = "--model llama3-70b --tokens 128Ki --hardware h100 --nodes 2 --inference serve --batch 8"


def call(words: str, width: int | None = None) -> tuple[int, str, str]:
    environment = {"COLUMNS": str(width)} if width else None
    result = CliRunner().invoke(app, ["plan", *shlex.split(words)], env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def told(words: str) -> dict[str, Any]:
    status, out, _ = call(words + " --json")
    found = json.loads(out)
    assert status == (0 if found["ok"] else 1)
    return found


def test_the_answer_comes_first_and_details_say_why() -> None:
    status, out, _ = call(FITS)
    assert status == 0 and out.startswith("Fits: 64 × H100, ring 64 over 8 nodes, zigzag, full recomputation")
    for part in (
        "tokens/s",
        "Limit: memory",
        "Memory: activations",
        "hidden behind",
        "the fewest nodes that fit, 6",
    ):
        assert part in out
    tables = (
        "Memory of one GPU",
        "K/V in flight",
        "Time of one layer",
        "Who travels",
        "Other ways:",
        "Assumed",
        "Words",
    )
    assert not any(part in out for part in tables) and "--details" in out.splitlines()[-2]
    _, detailed, _ = call(f"{FITS} --details")
    assert all(part in detailed for part in tables)
    assert "arXiv" in detailed  # the source of the assumed fractions of peak FLOP/s
    assert detailed.splitlines()[0] == out.splitlines()[0]
    assert detailed.count("ringlab plan") == len(told(FITS)["suggestions"]) > out.count("ringlab plan") == 3


def test_what_does_not_fit_ends_with_status_1_and_names_the_nearest() -> None:
    status, out, _ = call(f"{ASKED} --nodes 4")
    assert status == 1 and out.startswith(
        "Does not fit: 32 × H100 need at least 159 GB each and may use 80.4 GB"
    )
    assert "The nearest that fits" in out and "What to change" not in out
    found = told(f"{ASKED} --nodes 4")
    kinds = {each["kind"] for each in found["suggestions"]}
    assert (
        {"nodes", "tokens", "hardware", "offload"} <= kinds
        and not found["fits"]
        and found["limit"]["kind"] == "memory"
    )
    for each in found["suggestions"]:
        assert each["fits"] and told(each["command"].removeprefix("ringlab plan "))["fits"]


def test_json_has_everything_and_nothing_else_is_printed() -> None:
    found = told(FITS)
    wanted = "fits degrees layout chunk_tokens hidden step_s tokens_per_s limit suggestions memory time alternatives"
    assert {*wanted.split(), "assumptions", "communication", "command", "work_max_over_mean"} <= found.keys()
    degrees, memory = found["degrees"], found["memory"]
    assert degrees["dp"] * degrees["tp"] * degrees["ring"] * degrees["ulysses"] == found["gpus"] == 64
    assert sum(entry["bytes"] for entry in memory["entries"]) == memory["total_bytes"]
    assert memory["total_bytes"] < memory["usable_bytes"] == 0.94 * hardware("h100").memory_bytes


@pytest.mark.parametrize(
    "words",
    [f"{FITS} --batch 2", f"{FITS} --details", f"{ASKED} --nodes 4 --inference serve --batch 2 --details"],
)
def test_it_stays_within_the_width_of_the_terminal(words: str) -> None:
    """No printed line is wider than 80 columns; each run is a new process with a console of that width."""
    code = (
        "from rich.console import Console; import ringlab.cli.output as o, ringlab.cli.plan as p; "
        "o.people = p.people = Console(width=80); from ringlab.cli import app; app()"
    )
    command = [sys.executable, "-c", code, "plan", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "words",
    [
        "--inference prefill",
        "--inference decode --batch 8",
        "--inference serve --batch 8",
        "--no-causal --dtype float8",
    ],
)
def test_other_purposes_are_planned_and_shown(words: str) -> None:
    status, out, _ = call(f"{ASKED} --nodes 4 {words} --details")
    assert status == told(f"{ASKED} --nodes 4 {words}")["fits"] ^ 1
    assert out.startswith("Fits" if status == 0 else "Does not fit") and "Assumed" in out
    assert ("K/V cache" in out) == ("inference" in words)


def test_a_pipeline_and_offloaded_activations_are_shown() -> None:
    words = "--model llama3-8b --tokens 128Ki --hardware h100 --nodes 2 --batch 8 --pp 4 --interleave 2 --offload activations"
    words += " --logits-chunk 4Ki"
    status, out, _ = call(f"{words} --details")
    assert status == 0 and "pp 4 × " in out.splitlines()[0] and "activations on the host" in out
    for part in (
        "the slowest stage",
        "bubble",
        "micro-batches",
        "to and from the host",
        "PCIe 5.0 x16",
        "2 chunks of layers",
    ):
        assert part in " ".join(out.split()), part
    found = told(words)
    assert found["degrees"]["pp"] == 4 and found["memory"]["host_bytes"] > 0 and found["time"]["bubble_s"] > 0


def test_experts_pieces_and_offloads_are_taken_as_given_and_shown() -> None:
    words = "--model qwen3-30b-a3b --tokens 128Ki --hardware h100 --nodes 2 --ep 8 --ffn-chunk 4Ki --offload optimizer"
    status, out, _ = call(f"{words} --details")
    flat, found = " ".join(out.split()), told(words)
    assert status == 0 and "experts over ep 8" in out.splitlines()[0] and found["degrees"]["ep"] == 8
    for part in (
        "tokens to experts and back",
        "8 of 128 experts of 768",
        "more on the host",
        "once more in the backward",
    ):
        assert part in flat, part
    assert found["command"].endswith("--ep 8 --ffn-chunk 4Ki") and told(
        found["command"].removeprefix("ringlab plan ")
    )
    models = {it["name"]: it for it in told("--list")["models"]}
    assert models["deepseek-v3"]["parameters"] > 18 * models["deepseek-v3"]["active_parameters"]


def test_serving_says_tokens_a_second_and_the_time_to_the_first_token() -> None:
    words = f"{SERVE} --generated 1Ki --chunk 4Ki --tp 8 --cp 2 --dp 1 --sharing helix"
    status, out, _ = call(words)
    lines = out.splitlines()
    assert status == 0 and lines[0].startswith("Fits: 16 × H100, tp 8 × cp 2 over 2 nodes")
    asked = ServeRequest("llama3-70b", "h100", 8, 131_072, 2, 8, chunk=4096, generated=1024, sharing="helix")
    expected, found = serve_time(asked), told(words)
    assert found["serving"] | expected.as_dict() == found["serving"]
    assert found["serving"]["chunks_s"] == pytest.approx([*expected.chunks_s])
    assert found["step_s"] == expected.token_s and found["tokens_per_s"] == 8 / expected.token_s
    assert (found["sharing"], found["serving"]["prompt_tokens"]) == ("helix", 131_072 - 1024)
    flat = " ".join(out.split())
    assert (
        f"Serving: {expected.tokens_per_s:.0f} tokens/s, {1 / expected.token_s:.3g} tokens/s for each of 8 sequences"
        in flat
    )
    assert (
        f"first token after {expected.first_token_s:.3g} s (a prompt of 130,048 tokens in 32 chunks of 4,096)"
        in flat
    )
    assert f"Answer: 1,024 tokens {expected.answer_s:.3g} s after the prompt" in flat
    assert "(Helix)" in flat


def test_serving_weighs_every_way_to_share_and_takes_the_fastest() -> None:
    found = told(f"{SERVE} --dp 1 --tp 4")
    rows = {each["sharing"]: each["step_s"] for each in found["alternatives"]} | {
        found["sharing"]: found["step_s"]
    }
    assert rows.keys() == {"copies", "dcp", "helix"} and found["step_s"] == min(rows.values())
    for sharing, seconds in rows.items():
        assert told(f"{SERVE} --dp 1 --tp 4 --sharing {sharing}")["step_s"] == seconds
    assert found["serving"]["prefill_groups"] is None
    _, out, _ = call(f"{SERVE} --dp 1 --tp 4 --details")
    assert "first token" in out.split("Other ways")[1] and "Answer" not in out


def test_a_plan_to_serve_more_than_fits_names_the_sequences_that_do() -> None:
    status, out, _ = call(SERVE.replace("batch 8", "batch 100000"))
    assert status == 1 and out.startswith("Does not fit: 16 × H100 need at least")
    batch = next(
        it for it in told(SERVE.replace("batch 8", "batch 100000"))["suggestions"] if it["kind"] == "batch"
    )
    most = told(batch["command"].removeprefix("ringlab plan "))
    assert most["fits"] and f"the most sequences that fit with this split, {most['batch']:,}" in batch["why"]
    one_more = batch["command"].replace(f"--batch {most['batch']}", f"--batch {most['batch'] + 1}")
    assert not told(one_more.removeprefix("ringlab plan "))["fits"]


def test_who_travels_is_told() -> None:
    """Burst sends least if each query head has its own K/V head; without a ring no schedule is reported."""
    every = "--model llama2-7b --tokens 1Mi --hardware h100 --nodes 8 --tp 1 --ulysses 1 --logits-chunk 4Ki"
    _, out, _ = call(f"{every} --details")
    assert re.search("Who travels: burst sends least, .* a layer on each GPU", " ".join(out.split()))
    found = told(every)["travel"]
    assert found["sends_least"] == "burst" and {it["schedule"] for it in found["options"]} == set(RINGS)
    assert told(FITS)["travel"]["sends_least"] == "ring"
    for words in (f"{SERVE} --tp 8", f"{ASKED} --inference decode --nodes 4"):
        assert told(words)["travel"] is None and "Who travels" not in call(f"{words} --details")[1]


BAD = {  # one of each kind; tests/cost/test_planner.py has the constraints of degrees
    "--model lama3-70b --tokens 1M --hardware h100": ("a known model", "nearest: llama3-70b"),
    "--model llama3-70b --tokens 1M --hardware h10": ("a known hardware", "h100"),
    "--model llama3-70b --tokens -5 --hardware h100": ("a whole number from 1", ""),
    "--model llama3-70b --tokens many --hardware h100": ("tokens, such as", "suffixes"),
    f"{ASKED} --nodes -3": ("nodes >= 1", ""),
    f"{ASKED} --gpus-per-node 0": ("gpus_per_node >= 1", ""),
    f"{ASKED} --batch {10**23}": ("batch <= 1,048,576", ""),
    f"{ASKED} --nodes 1048576": ("nodes × GPUs of a node <= 1,048,576", ""),
    f"{ASKED} --tp 3": ("divides the H=64 query heads", "2 or 4"),
    f"{ASKED} --tp 8 --ulysses 3": ("tp × ulysses that divides", "16 or 32"),
    f"{ASKED} --tp 8 --cp 2 --dp 1": ("dp × tp × cp = 8 GPUs", "cp=1 with this dp and tp"),
    f"{ASKED} --ring 4 --ulysses 2 --cp 4": ("ring × ulysses = cp", "--cp 8"),
    f"{ASKED} --dp 2": ("batch divisible by dp", "--batch 2"),
    f"{ASKED} --nodes 4 --fsdp 7": ("fsdp that divides dp × cp, here at most 32 ranks", "--fsdp 4 or 8"),
    f"{ASKED} --nodes 4 --tp 2 --fsdp 32": ("fsdp that divides dp × cp, here 16 ranks", "--fsdp 16"),
    "--model llama3-70b --tokens 4 --hardware h100 --tp 1": ("at least one token per rank", "fewer nodes"),
    f"{ASKED} --layout zigzga": ("layout among", "nearest: zigzag"),
    f"{ASKED} --recomputation ful": ("recomputation among", "nearest: full"),
    f"{ASKED} --dtype int8": ("one of the dtypes", "nearest: float8"),
    f"{ASKED} --pp 3": ("pp that divides the 8 GPUs", ""),
    f"{ASKED} --nodes 20 --pp 160": ("pp <= 80 layers", ""),
    f"{ASKED} --interleave 2": ("a pipeline for interleave", "--pp"),
    f"{ASKED} --pp 8 --interleave 11": ("pp × interleave <= 82", ""),
    f"{ASKED} --pp 8 --interleave 2 --batch 4": ("that pp divides where stages interleave", ""),
    f"{ASKED} --pp 2 --inference prefill": ("pp for training only", "--cp and --tp"),
    f"{ASKED} --offload activation": ("offload among", "nearest: activations"),
    "--model llama3-8b --tokens 1M --hardware tpu-v4 --gpus-per-node 8 --offload activations": (
        "hardware with a host link", "host",
    ),
    f"{ASKED} --tile 0x128": ("a tile of rows x keys", "128x128"),
    f"{ASKED} --reserve nan": ("reserve", ""),
    f"{ASKED} --logits-chunk 0": ("a whole number from 1", ""),
    f"{ASKED} --inference serv": ("purpose among", "nearest: serve"),
    f"{ASKED} --inference serve --sharing heliks": ("sharing among", "nearest: helix"),
    f"{ASKED} --inference decode --sharing helix": ("sharing for serve only", "--inference serve"),
    f"{ASKED} --inference serve --ulysses 2": ("serve without ulysses", "--cp"),
    f"{ASKED} --inference serve --no-causal": ("a causal model to serve", ""),
    f"{ASKED} --inference serve --fsdp 2": ("serve without fsdp", "--sharing dcp"),
    f"{ASKED} --inference serve --tp 16 --cp 2 --nodes 4 --sharing helix": (
        "tp that divides the K=8", "--sharing copies",
    ),
    "--bound strip": ("one of the bounds", "nearest: striped"),
    "--bound context --model ring-7b --hardware a100 --ranks 0": ("ranks >= 1", ""),
    "--bound striped --model striped-1b --ranks 1025 --tokens 1M": ("ranks <= 1,024", ""),
    "--bound ring --hardware a100 --link betwen": ("a link: inside or between", "nearest: between"),
    "--bound ring --hardware a100 --bandwidth 12.5": ("bytes/s with a unit", ""),
}  # fmt: skip


@pytest.mark.parametrize("words", list(BAD))
def test_bad_input_is_told_with_its_constraint_and_a_way_out(words: str) -> None:
    """The error names the constraint and a remedy, in JSON and for people."""
    needed, remedy = BAD[words]
    status, out, err = call(words + " --json")
    error = json.loads(out)["error"]
    assert status == 1 and error["kind"] == "CostError"
    assert needed in error["needed"] and remedy in error["remedy"], error
    assert "needed:" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "words, option",
    [
        ("", "--model"),
        ("--model llama3-8b", "--tokens"),
        ("--model llama3-8b --tokens 1M", "--hardware"),
        ("--bound striped --model striped-1b", "--ranks"),
        ("--bound ring", "--hardware"),
        ("--bound context --model ring-7b --hardware a100", "--ranks"),
    ],
)
def test_what_is_missing_is_named(words: str, option: str) -> None:
    status, _, err = call(words)
    assert status == 2 and option in err


def test_files_of_ones_own_are_read_and_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    write_hardware(path, hardware("h100"))
    found = told(f"--model llama3-8b --tokens 128k --hardware {path} --nodes 2")
    assert found["ok"] and str(path) in found["command"]
    assert all(str(path) in each["command"] for each in found["suggestions"] if each["kind"] == "nodes")
    memory = re.search(r'^memory = "(.*)"$', path.read_text(), re.M)
    assert memory
    for before, after, complaint in (
        (memory[0], "memory = 80", "unit"),
        (memory[0], f'memery = "{memory[1]}"', "memery"),
    ):
        path.write_text(path.read_text().replace(before, after))
        status, _, err = call(f"--model llama3-8b --tokens 128k --hardware {path}")
        assert status == 1 and complaint in err and "line" in err
        path.write_text(path.read_text().replace(after, before))


def test_striped_bound_as_published() -> None:
    """The bound equals 1.72, as in table 3 of arXiv 2311.09431 for 1B, four A100 and 262144 tokens."""
    found = told("--bound striped --model striped-1b --ranks 4 --tokens 262144 --attention-weight 2")
    assert found["max_speedup"] == pytest.approx(1.72, abs=0.005)
    tiled = told(
        "--bound striped --model striped-1b --ranks 4 --tokens 262144 --attention-weight 2 --tile 2048x4096"
    )
    assert 1.41 < tiled["max_speedup"] < found["max_speedup"]


def test_ring_bound_says_whose_rates_it_takes_and_how_to_give_the_papers() -> None:
    """With the paper's 268 GB/s for TPU v4 the bounds are the paper's; the project's table differs."""
    asked = "--bound ring --hardware tpu-v4"
    own, paper = told(asked), told(f"{asked} --bandwidth '268 GB/s'")
    assert "formula of arXiv 2310.01889" in own["source"] and "this project's table" in own["source"]
    assert hardware("tpu-v4").inside.source in own["source"] and "as given" not in own["source"]
    assert "bandwidth as given" in paper["source"] and hardware("tpu-v4").inside.source not in paper["source"]
    assert [round(paper[f"min_{what}_tokens"], -2) for what in ("block", "sequence")] == [1000, 6200]
    assert own["min_block_tokens"] > 2 * paper["min_block_tokens"] and "--bandwidth" in own["note"]
    _, out, _ = call(asked)
    assert "formula of arXiv" in out and "--bandwidth" in out


def test_machines_are_called_what_they_are(tmp_path: Path) -> None:
    _, out, _ = call("--model llama3-8b --tokens 512k --hardware tpu-v4 --gpus-per-node 64 --details")
    assert "GPU" not in out.splitlines()[0] and "per TPU" in out.splitlines()[0] and "of one TPU" in out
    write_hardware(tmp_path / "mine.toml", replace(hardware("h100"), name="laptop"))
    _, out, _ = call(
        f"--model llama3-8b --tokens 128k --hardware {tmp_path / 'mine.toml'} --gpus-per-node 4 --logits-chunk 4Ki"
    )
    assert "4 × laptop" in out.splitlines()[0] and "per rank" in out.splitlines()[0]


def test_context_bound_lists_all_architectures() -> None:
    found = told("--bound context --model ring-7b --hardware a100 --ranks 32")["max_context_tokens"]
    assert found["ring"] > found["blockwise"] > found["memory-efficient"] > found["vanilla"] > 0
    assert "Source: arXiv 2310.01889" in call("--bound context --model ring-7b --hardware a100 --ranks 32")[1]


def test_the_list_has_every_name_with_its_source() -> None:
    found = told("--list")
    assert [each["name"] for each in found["models"]] == list(model_names())
    assert [each["name"] for each in found["hardware"]] == list(hardware_names())
    assert all(each["source"] for each in found["models"]) and all(
        all(each["sources"]) for each in found["hardware"]
    )
    _, out, _ = call("--list")
    assert all(name in out for name in (*model_names(), *hardware_names()))


@pytest.mark.parametrize(
    "words", [f"{ASKED} --nodes 4", f"{ASKED} --inference serve", "--bound ring --hardware a100"]
)
def test_torch_is_not_imported(words: str) -> None:
    """A plan imports no heavy package: torch alone takes longer to import than a plan may take."""
    code = "import sys\nfrom ringlab.cli import app\ntry:\n    app()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "plan", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1)
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert "typer" in loaded and not loaded & {"torch", "triton", "matplotlib", "IPython", "pandas", "scipy"}


def test_the_printed_range_holds_every_published_run() -> None:
    found = told(FITS)["published"]
    _, out, _ = call(FITS)
    ((least, most),) = [map(float, each) for each in re.findall(r"took ([\d.]+) to ([\d.]+) times", out)]
    assert least <= found["least"] and found["most"] <= most


def test_more_nodes_that_make_a_step_longer_are_said_to_slow_it_down() -> None:
    found = told("--model deepseek-v3 --tokens 32K --hardware h100 --nodes 256")
    (said,) = [each for each in found["suggestions"] if each["why"].startswith("twice the nodes")]
    assert said["why"] == "twice the nodes would slow it down"
