"""Loops over documents and tokens, a receive buffer posted ahead, and the own block first."""

import bisect


def bounds_of(position_ids):
    cu, documents = [], []
    for token, position in enumerate(position_ids.tolist()):
        if position == 0:
            cu.append(token)
        documents.append(len(cu) - 1)
    return torch.tensor([*cu, len(documents)], dtype=torch.int32), torch.tensor(documents)


def shard_packed(tokens, cu_seqlens, own):
    bounds = cu_seqlens.tolist()
    labels, positions = [], []
    for token in own.tolist():
        document = bisect.bisect_right(bounds, token) - 1
        last = token + 1 == bounds[document + 1]
        labels.append(-100 if last else int(tokens[token + 1]))
        positions.append(token - bounds[document])
    made = (torch.tensor(numbers, dtype=torch.int64) for numbers in (labels, positions))
    return tokens.index_select(0, own), *made


def packed_ring(ring, q, k, v, places, cu_seqlens):
    P, mine = ring.world_size, places[ring.rank]
    bounds = cu_seqlens.long()

    def document(places):
        return torch.searchsorted(bounds, places, right=True)

    parts = []
    for step in range(P):
        origin = ring.origin(step)
        theirs = places[origin]
        due = len(places[ring.origin(step + 1)])
        work = ring.post(k, v, length=due) if step < P - 1 else None
        seen = document(mine)[:, None].eq(document(theirs)[None]).logical_and(mine[:, None] >= theirs[None])
        if bool(seen.any()):
            parts.append(ring.compute("attend", attend, q, k, v, seen))
        if work is not None:
            k, v = work.wait()
    total = Partial.identity(q)
    for part in parts:
        total = merge(total, part)
    return total.out, total.lse


def token_weights(ring, counted, documents, n):
    counts = torch.zeros(n, dtype=torch.float64)
    for document in documents[counted].tolist():
        counts[document] += 1
    counts = ring.all_reduce(counts)
    weights = torch.zeros(len(documents), dtype=torch.float64)
    for token, (document, counts_here) in enumerate(zip(documents.tolist(), counted.tolist(), strict=True)):
        if counts_here:
            weights[token] = 1 / counts[document] / torch.count_nonzero(counts)
    return weights
