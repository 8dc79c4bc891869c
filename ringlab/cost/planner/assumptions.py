"""The assumptions behind a plan, in sentences that are printed with the plan."""

from __future__ import annotations

from ringlab.cost.models import Layer, Model
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.search import Candidate
from ringlab.cost.planner.step_time import measured_time
from ringlab.cost.units import in_percent, short


def assumptions(best: Candidate) -> tuple[str, ...]:
    """Return the assumptions behind a plan, in sentences."""
    request = best.request
    machine, sizes = request.machine, request.sized
    found = [
        f"{machine.title}: {short(machine.peak(request.dtype), 'FLOP/s')} in {request.dtype}; {_link(request)}",
        _reached(request),
        *_model(sizes),
        f"{in_percent(request.reserve)} of each {request.machine_word}'s memory is left for the driver, communication buffers and "
        "fragmentation (--reserve)",
        *_seen(request),
        "all items of the memory are added as if their peaks fell together",
    ]
    if request.dtype not in ("bfloat16", "float16"):
        found.append(f"{request.dtype} reaches the same fractions of its peak as 16 bits do of theirs")
    if request.decoding:
        return (*found, *_decoding(best), *(_serving(best) if request.purpose == "serve" else _sharing(best)))
    found += [
        "communication takes no time away from computing, and links of different ranks do not disturb each other",
        "norms, rotary embedding, activation functions, merging and launches take no time"
        if measured_time(request, sizes.D) is None
        else "norms, rotary embedding and activation functions take no time",
        f"kernel tiles of {request.tile[0]} × {request.tile[1]}: one that is not wholly masked is computed wholly",
    ]
    if best.degrees.ulysses > 1:
        found.append("Ulysses' all-to-alls overlap with nothing")
    if best.degrees.tp > 1:
        found.append("tensor parallelism with sequence parallelism; its collectives overlap with nothing")
    if request.training:
        found += _training(best)
    return tuple(found)


def _model(it: Model) -> list[str]:
    if not it.kind:
        return [
            f"{it.title}: {it.layers} layers, d {it.d_model}, {it.H} query and {it.K} K/V heads of "
            f"{it.D}, feed-forward {it.d_ff}, {it.parameters / 1e9:.3g} billion parameters"
        ]
    active = f", {it.active_parameters / 1e9:.3g} billion for each token" if it.expert_parameters else ""
    counts = f"{it.parameters / 1e9:.3g} billion parameters{active}"
    return [f"{it.title}: {it.layers} layers, d {it.d_model}, {counts}", *map(_kind, it.kinds)]


def _kind(it: Layer) -> str:
    if it.linear:
        mixer = f"a gated delta rule, {it.H} heads of v of {it.value_dim} and {it.K} of q and k of {it.D}"
    elif it.kv_latent:
        held = f"{it.latent} numbers of a token" if it.latent else "K and V of all heads"
        mixer = f"latent attention, {it.H} heads of {it.D}, {held} cached"
    else:
        mixer = f"attention, {it.H} query and {it.K} K/V heads of {it.D}"
    mixer += f", the last {it.window:,} tokens" if it.window else ""
    fed = f"feed-forward {it.d_ff}"
    if it.experts:
        fed = f"{it.active_experts} of {it.experts} experts of {it.d_ff}"
        fed += f" and a shared one of {it.shared_d_ff}" if it.shared_d_ff else ""
    return f"{it.layers} layers: {mixer}; {fed}"


def _seen(request: Request) -> list[str]:
    it, found = request.sized, []
    if not it.kind:
        found.append(
            "all tokens attend to all before them: no sliding window, in whatever model has one"
            if request.causal
            else "all tokens attend to all"
        )
    elif not request.causal:
        found.append("tokens attend to tokens after them, too")
    for travels, more in {
        (bool(each.latent), each.H * (each.D + each.value_dim) / each.latent_numbers)
        for each in it.kinds
        if each.kv_latent
    }:
        found.append(
            "the latent travels and is cached, and K and V are made from it wherever a block of it arrives; a "
            f"program that sends K and V of all heads in its place sends {more:.0f} times as many bytes"
            if travels
            else f"K and V of all heads travel and are cached, {more:.0f} times as many bytes as the latent from which "
            "they are made"
        )
    if any(layer.linear for layer in it.kinds):
        found.append(
            "chunks of the gated delta rule reach the fraction of the peak that attention reaches; its states "
            "pass by the fastest scan, which nothing hides"
        )
    if it.expert_parameters:
        found.append(
            "every expert gets equally many tokens; "
            + (
                "each expert is shared by its width, like any feed-forward, so that no token is sent to experts"
                if request.decoding
                else "a token is sent to each of its experts and back if ranks share the experts (--ep), which nothing "
                "hides; otherwise experts are gathered like all weights"
            )
        )
    return found


def _link(request: Request) -> str:
    inside, between = request.machine.inside, request.machine.between
    words = [f"{inside.name} {short(inside.bytes_per_s, 'bytes/s')} one way inside a node"]
    if request.nodes > 1:
        words.append(
            f"{between.name} {short(between.bytes_per_s, 'bytes/s')} per {request.machine_word} between nodes"
        )
    return ", ".join(words)


def _reached(request: Request) -> str:
    it = request.machine.reached
    measured = measured_time(request, request.sized.D)
    if measured is not None:
        return f"attention takes as long as measured ({measured.forward.source}); matrices reach {in_percent(it.linear)} of the peak"
    if it.linear == it.attention_forward == it.attention_backward == 1:
        return f"kernels reach the whole peak, so real steps take longer ({it.source})"
    return (
        f"kernels reach {in_percent(it.linear)} of the peak in matrices, {in_percent(it.attention_forward)} in "
        f"attention forward and {in_percent(it.attention_backward)} backward ({it.source})"
    )


def _training(best: Candidate) -> list[str]:
    found = [
        "Adam with float32 moments and gradients; weights are gathered and gradients reduced during the computation "
        "of a layer, on what the ring leaves free of the links",
        "no dropout; data loading and checkpoints take no time",
    ]
    if best.degrees.pp > 1:
        found += _pipeline(best)
    if best.request.offload != "none":
        found.append(_offload(best))
    if best.request.ffn_chunk is not None:
        found.append(
            "the feed-forward is computed some tokens at a time, and once more in the backward (--ffn-chunk)"
        )
    if best.recomputation != "none":
        found.append("what is computed again sends its messages again, too")
    if best.request.logits_chunk is None:
        found.append(
            "the logits of all of a rank's tokens are in memory at once, and in float32 their log-softmax and the "
            "gradients of both (--logits-chunk)"
        )
    return found


def _pipeline(best: Candidate) -> list[str]:
    chunks = best.request.interleave
    several = f", {chunks} chunks of layers on each" if chunks > 1 else ""
    return [
        f"stages take a forward and a backward in turn{several}; the slowest sets the pace, and messages between stages "
        "hide except while the pipeline fills and drains",
        "every micro-batch gathers the weights of its layers and reduces their gradients again",
    ]


def _offload(best: Candidate) -> str:
    host = best.request.machine.host
    assert host is not None, "a request to offload was checked"
    what = " and ".join(best.request.offload.split(","))
    optimizer = ""
    if "optimizer" in best.request.offloads:
        optimizer = "; gradients leave during the backward, and in the update they and the moments pass the GPU in pieces"
    return (
        f"{what} leave over {host.name}, {short(host.bytes_per_s, 'bytes/s')} one way, and come back during computation{optimizer}; "
        f"the host has {short(host.memory_bytes, 'bytes')} for each {best.request.machine_word}, fast enough for all of them"
    )


def _decoding(best: Candidate) -> list[str]:
    return [
        "a token takes as long as reading the weights and the K/V cache once: arithmetic hides behind it, except that of so many "
        "sequences that the matrices compute longer than they are read",
        f"the cache holds {best.request.tokens:,} tokens of each sequence, shared out evenly; no batching beyond --batch",
    ]


def _sharing(best: Candidate) -> list[str]:
    if best.degrees.ring == 1:
        return []
    found = "every rank that shares the cache holds its TP part of the weights (--inference serve weighs other ways to share)"
    return [found]


def _serving(best: Candidate) -> list[str]:
    request = best.request
    pool = f"{best.degrees.tp * best.degrees.ring} more {request.machine_word}s for each replica"
    return [
        "nothing hides communication while decoding; launches, sampling and the scheduler take no time",
        f"prompts are fed one at a time on {pool}, tp {best.degrees.tp} × cp {best.degrees.ring}, whose memory is checked, too, and "
        "their K/V move to the ranks that decode in no time; no prefix is reused",
        "tokens a second are those of sequences that have reached their whole length: shorter ones are faster",
        "the fastest is the split with the shortest token; the time to the first token follows from it",
    ]
