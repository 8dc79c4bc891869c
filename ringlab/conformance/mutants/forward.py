"""Wrong rings whose forward, mask or precision is wrong."""

from __future__ import annotations

from ringlab.conformance.mutants.mutant import Mutant

_MERGED = "    return out * kept[..., None] + new * added[..., None], total"
_TOTAL = "    total = torch.logaddexp(lse, new_lse)\n"
_LSE = "    lse = torch.logsumexp(scores, dim=-1)\n"
_HIDDEN = "theirs[keys] > mine[rows, None]"
_WHOLE = "        for rows, keys, hidden in call.tiles(step):\n            tile_out"
_STATE = "    out = torch.zeros(q.shape, dtype=state(q.dtype), device=q.device)"
_MERGING = "            out[:, :, rows], lse[:, :, rows] = merged\n"

FORWARD = (
    Mutant("averages_blocks", "forward", "the merge takes the mean of the blocks", ((_MERGED, "    first = (lse == -math.inf)[..., None]\n    return torch.where(first, new, (out + new) / 2), total"),), "forward"),
    Mutant("adds_blocks", "forward", "the merge adds normalised outputs", ((_MERGED, "    return out + new, total"),), "forward"),
    Mutant("keeps_the_old_weight", "forward", "what was there is not rescaled by the new maximum", ((_MERGED, "    return out + (new - out) * added[..., None] * (lse > -math.inf)[..., None] * 0.5 + new * added[..., None] * 0.5, total"),), "forward"),
    Mutant("forgets_the_old_sum", "forward", "the factor of the old sum is missing: (o e^(m−m') + …) / l'", ((_MERGED, "    top = torch.maximum(lse, new_lse)\n    return out * torch.exp(-safe(total) + safe(top))[..., None] * torch.exp(lse - safe(top)).clamp(max=1.0)[..., None].sqrt() + new * added[..., None], total"),), "forward"),
    Mutant("lse_of_the_last_block", "forward", "lse is that of the block merged last", ((_MERGED, _MERGED.replace("total", "torch.where(new_lse == -math.inf, lse, new_lse)")),), "forward"),
    Mutant("lse_is_the_larger", "forward", "lse is the larger one of the two", ((_TOTAL, "    total = torch.maximum(lse, new_lse)\n"),), "forward"),
    Mutant("lse_in_base_two", "forward", "the returned lse counts in base 2", (("        out = out.to(q.dtype)\n", "        out = out.to(q.dtype)\n        told = lse / math.log(2)\n"), ("        ctx.mark_non_differentiable(lse)\n        return out, lse", "        ctx.mark_non_differentiable(told)\n        return out, told")), "lse"),
    Mutant("no_maximum", "forward", "exponentials without a maximum overflow", ((_LSE, "    lse = torch.exp(scores).sum(-1).log()\n"),), "large logits"),
    Mutant("merges_without_a_maximum", "forward", "the merge takes exponentials of lse as they are", ((_TOTAL, "    total = torch.log(torch.exp(lse) + torch.exp(new_lse))\n"),), "large logits"),
    Mutant("log_of_one_plus", "forward", "the merge takes log(1 + e^x), which overflows where a later block is much larger", ((_TOTAL, "    total = torch.where(lse == -math.inf, new_lse, lse + torch.log1p(torch.exp(new_lse - lse)))\n"),), "sloped logits"),
    Mutant("no_scale", "forward", "scores are not scaled", (("    scores = call.scale * (q.to", "    scores = (q.to"),), "forward"),
    Mutant("scale_of_its_own", "forward", "a scale that is given is ignored", (("    scale = q.shape[-1] ** -0.5 if scale is None else scale\n", "    scale = q.shape[-1] ** -0.5\n"),), "scale"),
    Mutant("values_are_keys", "forward", "keys are taken for values", (("    return weights @ repeated(v, q.shape[1])", "    return weights @ repeated(k, q.shape[1])"),), "forward"),
    Mutant("skips_the_last_block", "forward", "the block that comes last is not attended to", ((_WHOLE, "        for rows, keys, hidden in call.tiles(step) if step < max(1, ring.world_size - 1) else []:\n            tile_out"),), "forward"),
    Mutant("skips_its_own_block", "forward", "a rank does not attend to its own block", ((_WHOLE, "        for rows, keys, hidden in call.tiles(step) if step or ring.world_size == 1 else []:\n            tile_out"),), "forward"),
    Mutant("heads_in_turn", "forward", "query head h reads key/value head h % K", (("kv.repeat_interleave(heads // kv.shape[1], dim=1)", "kv.repeat(1, heads // kv.shape[1], 1, 1)"), ("gradient.unflatten(1, (heads, -1)).sum(2)", "gradient.unflatten(1, (-1, heads)).sum(1)")), "grouped heads"),
    Mutant("first_head_for_all", "forward", "all query heads read the first key/value head", (("kv.repeat_interleave(heads // kv.shape[1], dim=1)", "kv[:, :1].expand(-1, heads, -1, -1) if heads > kv.shape[1] else kv"),), "grouped heads"),
    Mutant("origin_the_other_way", "mask", "the block after t hops is taken for that of rank r + t", (("        mine, theirs = self.positions[self.ring.rank], self.positions[self.ring.origin(step)]", "        other = self.positions[self.ring.origin(-step)]\n        mine, theirs = self.positions[self.ring.rank], self.positions[self.ring.origin(step)]\n        theirs = other if len(other) == len(theirs) else theirs"),), "masks"),
    Mutant("mask_in_local_indices", "mask", "the mask compares indices inside the shards", (("        found: list", "        mine, theirs = torch.arange(len(mine)), torch.arange(len(theirs))\n        found: list"),), "masks"),
    Mutant("mask_as_if_contiguous", "mask", "the mask takes every layout for contiguous", (("        found: list", "        before = [sum(map(len, self.positions[:r])) for r in range(self.ring.world_size)]\n        mine = before[self.ring.rank] + torch.arange(len(mine))\n        theirs = before[self.ring.origin(step)] + torch.arange(len(theirs))\n        found: list"),), "masks"),
    Mutant("sees_one_too_many", "mask", "a query sees the key after its own", ((_HIDDEN, "theirs[keys] > mine[rows, None] + 1"), ("mine[rows].max() >= theirs", "mine[rows].max() + 1 >= theirs")), "causality"),
    Mutant("sees_one_too_few", "mask", "a query does not see its own key", ((_HIDDEN, "theirs[keys] >= mine[rows, None]"),), "masks"),
    Mutant("no_mask", "mask", "nothing is masked", ((_HIDDEN, "(theirs[keys] > mine[rows, None]) & False"), ("elif mine[rows].max() >= theirs[keys].min():", "else:")), "causality"),
    Mutant("masks_the_past", "mask", "the mask is upper-triangular", ((_HIDDEN, "theirs[keys] < mine[rows, None]"), ("elif mine[rows].max() >= theirs[keys].min():", "else:")), "causality"),
    Mutant("masks_only_its_own_block", "mask", "blocks of other ranks are not masked", ((_HIDDEN, "(theirs[keys] > mine[rows, None]) & (step == 0)"), ("elif mine[rows].max() >= theirs[keys].min():", "elif step or mine[rows].max() >= theirs[keys].min():")), "causality"),
    Mutant("mask_of_minus_1e4", "mask", "hidden scores are −10,000 instead of −∞", (("scores.masked_fill(hidden, -math.inf)", "scores.masked_fill(hidden, -1e4)"),), "blind rows"),
    Mutant("nan_in_blind_rows", "mask", "−∞ − (−∞) in rows that see no key of a block", (("    weights = torch.exp(scores - safe(lse)[..., None])\n    return", "    weights = torch.exp(scores - lse[..., None])\n    return"),), "masks"),
    Mutant("nan_in_the_merge", "forward", "the merge by sigmoids gives NaN where nothing was seen before", ((_TOTAL, "    total = lse - torch.nn.functional.logsigmoid(lse - new_lse)\n"),), "forward"),
    Mutant("mask_kept_from_the_first_block", "mask", "a mask is kept by its shape, and used again for another block", (("                elif mine[rows].max()", "                elif (len(mine), rows.start, len(theirs), keys.start, self.ring.rank) in _masks:\n                    kept = _masks[len(mine), rows.start, len(theirs), keys.start, self.ring.rank]\n                    found.append((rows, keys, kept if kept.shape == (rows.stop - rows.start, keys.stop - keys.start) else theirs[keys] > mine[rows, None]))\n                elif mine[rows].max()"), ("                    found.append((rows, keys, theirs[keys] > mine[rows, None]))", "                    _masks[len(mine), rows.start, len(theirs), keys.start, self.ring.rank] = theirs[keys] > mine[rows, None]\n                    found.append((rows, keys, theirs[keys] > mine[rows, None]))"), ("@dataclass(frozen=True)\nclass Call:", "_masks: dict[Any, Any] = {}\n\n\n@dataclass(frozen=True)\nclass Call:")), "masks"),
    Mutant("state_in_the_inputs_dtype", "precision", "out is summed in the inputs' dtype", ((_STATE, _STATE.replace("state(q.dtype)", "q.dtype")), ("lse = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype, device", "lse = torch.full(q.shape[:-1], -math.inf, dtype=state(q.dtype), device")), "error growth"),
    Mutant("lse_in_the_inputs_dtype", "precision", "lse is carried in the inputs' dtype", ((_MERGING, _MERGING + "            lse[:, :, rows] = lse[:, :, rows].to(q.dtype).to(lse.dtype)\n"),), "error growth"),
    Mutant("state_in_float32", "precision", "the state is float32 for float64 inputs", (("    return torch.promote_types(dtype, torch.float32)", "    return torch.float32"), (" @ repeated(v, q.shape[1]).to(scores.dtype), lse", " @ repeated(v, q.shape[1]).to(scores.dtype), lse")), "forward"),
    Mutant("weights_in_bfloat16", "precision", "the weights are rounded to bfloat16, whatever the dtype", (("    return weights @ repeated(v, q.shape[1]).to(scores.dtype), lse", "    return weights.bfloat16().to(scores.dtype) @ repeated(v, q.shape[1]).to(scores.dtype), lse"),), "forward"),
    Mutant("returns_float32", "precision", "out is float32 for bfloat16 inputs", (("        out = out.to(q.dtype)\n        ctx", "        ctx"),), "types"),
)  # fmt: skip
