"""`ringlab plan --inference serve`, and the line that says who travels."""

from __future__ import annotations

import re

import pytest

from ringlab.cost.planner.serve_time import ServeRequest, serve_time
from ringlab.cost.traffic import RINGS
from tests.cli.test_plan import ASKED, FITS, call, check_that_it_is_told, told

SERVE = "--model llama3-70b --tokens 128Ki --hardware h100 --nodes 2 --inference serve --batch 8"


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
    _, out, _ = call(f"{SERVE} --dp 1 --tp 4")
    assert "first token" in out.split("Also weighed")[1] and "Answer" not in out


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


def test_weights_too_large_for_the_gpus_that_feed_prompts() -> None:
    """Llama 3 405B is 101 GB a GPU over the 8 of a node, and half of that over two nodes."""
    found = told("--model llama3-405b --tokens 128Ki --hardware h100 --nodes 2 --inference serve --tp 8")
    assert not found["fits"] and found["memory"]["entries"][0]["note"].startswith(
        "of a GPU that feeds prompts"
    )
    wider = next(it for it in found["suggestions"] if it["kind"] == "degrees")
    assert "--tp 16" in wider["command"] and told(wider["command"].removeprefix("ringlab plan "))["fits"]


def test_who_travels_is_told() -> None:
    """Burst sends less where all query heads have K/V heads of their own; a plan without a ring says nothing."""
    every = "--model llama2-7b --tokens 1Mi --hardware h100 --nodes 8 --tp 1 --ulysses 1 --logits-chunk 4Ki"
    _, out, _ = call(every)
    assert re.search("Who travels: burst sends least, .* a layer on each GPU", " ".join(out.split()))
    found = told(every)["travel"]
    assert found["sends_least"] == "burst" and {it["schedule"] for it in found["options"]} == set(RINGS)
    assert told(FITS)["travel"]["sends_least"] == "ring"
    for words in (f"{SERVE} --tp 8", f"{ASKED} --inference decode --nodes 4"):
        assert told(words)["travel"] is None and "Who travels" not in call(words)[1]


BAD = {
    f"{ASKED} --inference serve --ulysses 2": ("serve without ulysses", "--cp"),
    f"{ASKED} --inference serv": ("purpose among", "nearest: serve"),
    f"{ASKED} --inference serve --sharing heliks": ("sharing among", "nearest: helix"),
    f"{ASKED} --inference decode --sharing helix": ("sharing for serve only", "--inference serve"),
    f"{ASKED} --generated 1Ki": ("generated for serve only", "--inference serve"),
    f"{ASKED} --inference prefill --chunk 1Ki": ("chunk for serve only", "--inference serve"),
    f"{ASKED} --inference serve --generated 1M": ("generated: an integer from 0 to 999,999", "prompt"),
    f"{ASKED} --inference serve --chunk 100": ("chunk >= 245", ""),
    f"{ASKED} --inference serve --chunk 0": ("a whole number from 1", ""),
    f"{ASKED} --inference serve --no-causal": ("a causal model to serve", ""),
    f"{ASKED} --inference serve --fsdp 2": ("serve without fsdp", "--sharing dcp"),
    f"{ASKED} --inference serve --tp 16 --cp 2 --nodes 4 --sharing helix": (
        "tp that divides the K=8",
        "--sharing copies",
    ),
}


@pytest.mark.parametrize("words", list(BAD))
def test_bad_input_is_told(words: str) -> None:
    check_that_it_is_told(words, *BAD[words])
