"""Wrong rings whose forward is right and whose gradients are wrong."""

from __future__ import annotations

from ringlab.conformance.mutants.mutant import Mutant

_PAIR = "    weights = torch.exp(scores_of(call, q, k, hidden) - safe(lse)[..., None])\n"
_DELTA = "    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)\n"
_SENT = '            courier = ring.post(dk, dv, length=call.length(step + 1), tag="dkv")\n'
_ADDED = "            dk, dv = dk + arrived_dk, dv + arrived_dv\n"
_HOME = "        dk, dv = courier.wait()\n    return dq, dk, dv"
_SCORES = "    dscores = weights * (dweights - delta[..., None])\n"
_RETURNED = "        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None"
_CALLED = "        dq, dk, dv = backward(ctx.call, q, k, v, out, lse, dout)\n"
_MOVES_ON = "        if work is not None:\n            k, v = work.wait()\n    if courier is not None:"

BACKWARD = (
    Mutant("delta_of_the_block", "backward", "delta is that of each block, not of the whole", ((_SCORES, "    own = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)\n    delta = (own * dweights).sum(-1)\n" + _SCORES),), "dq"),
    Mutant("lse_of_the_block", "backward", "weights come from each block's own lse", ((_PAIR, "    lse = torch.logsumexp(scores_of(call, q, k, hidden), dim=-1)\n" + _PAIR),), "dv"),
    Mutant("no_delta", "backward", "delta is forgotten", ((_SCORES, "    dscores = weights * dweights\n"),), "dq"),
    Mutant("delta_without_out", "backward", "delta is the sum of dout", ((_DELTA, "    delta = dout.to(lse.dtype).sum(-1)\n"),), "dq"),
    Mutant("gradients_stay", "backward", "dK and dV stay where they are computed", ((_ADDED, "            pass\n"), ("    if courier is not None:\n" + _HOME, "    if courier is not None:\n        courier.wait()\n    return dq, dk, dv")), "dk"),
    Mutant("one_hop_short", "backward", "dK and dV make P − 1 hops and end at a neighbour", (("        if ring.world_size > 1:\n" + _SENT, "        if not last:\n" + _SENT.replace("step + 1", "step + 1")), (_HOME, "        pass\n    return dq, dk, dv")), "dk"),
    Mutant("the_other_direction", "backward", "dK and dV travel against K and V", ((_SENT, '            courier = against(ring, dk, dv)\n'), ("def tile_backward(", 'def against(ring: Ring, *sums: Tensor) -> Any:\n    """Send to the previous rank."""\n    buffers = tuple(torch.empty_like(x) for x in sums)\n    return ring.comm.exchange(send=sums, to=ring.previous, receive=buffers, source=ring.next, tag="dkv")\n\n\ndef tile_backward(')), "dk"),
    Mutant("swaps_dk_and_dv", "backward", "what arrives is taken for (dV, dK)", (("            arrived_dk, arrived_dv = courier.wait()", "            arrived_dv, arrived_dk = courier.wait()"),), "dk"),
    Mutant("takes_what_it_sent", "backward", "(received, sent) are taken for (dK, dV)", (("            arrived_dk, arrived_dv = courier.wait()", "            arrived_dk, arrived_dv = courier.wait()[0], sent"), (_SENT, _SENT + "            sent = dk\n")), "dv"),
    Mutant("first_block_again", "backward", "backward uses the first step's K and V in all steps", ((_MOVES_ON, _MOVES_ON.replace("k, v = work.wait()", "arrived = work.wait()\n            k, v = (k, v) if arrived[0].shape == k.shape else arrived")),), "dq"),
    Mutant("block_one_step_late", "backward", "gradients are computed with the block that came before", ((_MOVES_ON, _MOVES_ON.replace("k, v = work.wait()", "arrived = work.wait()\n            k, v = (arrived if step else (k, v)) if arrived[0].shape == k.shape else arrived")),), "dk"),
    Mutant("dq_of_the_last_block", "backward", "dQ holds the last block's part only", (("            dq[:, :, rows] += parts[0]\n", "            dq[:, :, rows] = parts[0]\n"),), "dq"),
    Mutant("drops_its_own_part", "backward", "a rank's own part of dK and dV is overwritten by what arrives", ((_ADDED, "            dk, dv = arrived_dk, arrived_dv\n"),), "dk"),
    Mutant("no_scale_in_dq", "backward", "dQ is not scaled", (("    dq = call.scale * (dscores", "    dq = (dscores"),), "dq"),
    Mutant("no_scale_in_dk", "backward", "dK is not scaled", (("    dk = call.scale * (dscores", "    dk = (dscores"),), "dk"),
    Mutant("mean_over_ranks", "backward", "dK and dV are divided by P", ((_RETURNED, _RETURNED.replace("dk.to(k.dtype), dv.to(v.dtype)", "(dk / ctx.call.ring.world_size).to(k.dtype), (dv / ctx.call.ring.world_size).to(v.dtype)")),), "dk"),
    Mutant("one_head_of_the_group", "backward", "dK and dV count one query head of each group", (("gradient.unflatten(1, (heads, -1)).sum(2)", "gradient.unflatten(1, (heads, -1))[:, :, 0]"),), "grouped heads"),
    Mutant("no_mask_in_backward", "backward", "backward does not mask", ((_PAIR, "    hidden = None\n" + _PAIR),), "causality"),
    Mutant("nan_in_blind_rows_of_backward", "backward", "a row that saw no key has NaN gradients", (("    dscores = weights * (dweights", "    weights = weights / (1.0 - (hidden.all(-1).to(dtype)[:, None] if hidden is not None else 0.0))\n    dscores = weights * (dweights"),), "masks"),
    Mutant("gradients_in_bfloat16", "backward", "dQ is rounded to bfloat16, whatever the dtype", ((_RETURNED, _RETURNED.replace("dq.to(q.dtype)", "dq.bfloat16().to(q.dtype)")),), "dq"),
    Mutant("dq_summed_in_the_inputs_dtype", "precision", "dQ is summed in the inputs' dtype", (("    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)", "    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)"),), "error growth"),
    Mutant("couriers_in_the_inputs_dtype", "precision", "dK and dV travel in the inputs' dtype", (("            courier = ring.post(dk, dv,", "            courier = ring.post(dk.to(k.dtype), dv.to(v.dtype),"),), "error growth"),
    Mutant("dkv_in_float32", "precision", "dK and dV travel in float32 for float64 inputs", (("            courier = ring.post(dk, dv,", "            courier = ring.post(dk.float(), dv.float(),"),), "dk"),
    Mutant("delta_in_bfloat16", "precision", "delta is rounded to bfloat16", ((_DELTA, _DELTA + "    delta = delta.bfloat16().to(lse.dtype)\n"),), "dq"),
    Mutant("zeros_for_an_error_in_backward", "backward", "an error in backward becomes gradients of zeros", ((_CALLED, "        try:\n    " + _CALLED + "        except Exception:\n            dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))\n"),), "dies in backward"),
    Mutant("wrong_head_under_a_mask", "backward", "where tiles are masked, dK goes to the next key/value head", (("    return dq, shared(dk, heads), shared(dv, heads)", "    return dq, shared(dk, heads) if hidden is None else shared(dk, heads).roll(1, 1), shared(dv, heads)"),), "masks"),
    Mutant("lse_of_the_last_forward", "backward", "backward takes the lse of the forward that came last, not of its own", (("        q, k, v, out, lse = ctx.saved_tensors\n", "        q, k, v, out, lse = ctx.saved_tensors\n        lse = _last[ctx.call.ring.rank]\n"), ("        ctx.call = call\n", "        ctx.call = call\n        _last[call.ring.rank] = lse\n"), ("@dataclass(frozen=True)\nclass Call:", "_last: dict[int, Tensor] = {}\n\n\n@dataclass(frozen=True)\nclass Call:")), "two layers"),
)  # fmt: skip
