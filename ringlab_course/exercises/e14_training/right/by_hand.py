"""Labels looked up, −log p gathered, gradients around a ring, backward() and a loss as a number."""


def shard_batch(tokens, counts, own):
    after = (own + 1).clamp(max=tokens.shape[1] - 1)
    labels = torch.where((own + 1 < tokens.shape[1]) & counts[:, own], tokens[:, after], -100)
    return tokens.index_select(1, own), labels, own.clone()


def loss_share(ring, logits, labels):
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    counted = labels != -100
    count = sum(int(n) for n in ring.all_gather(counted.sum().view(1)))
    logs = logits - logits.logsumexp(-1, keepdim=True)
    picked = logs.gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
    return -(picked * counted).sum() / count


def sum_gradients(ring, weights, gradients):
    wide = torch.float64 if weights[0].dtype == torch.float64 else torch.float32
    flat = torch.zeros(sum(w.numel() for w in weights), dtype=wide)
    begins, at = [], 0
    for w, g in zip(weights, gradients, strict=True):
        if g is not None:
            flat[at : at + w.numel()] = g.reshape(-1)
        begins.append(at)
        at += w.numel()
    total, sent = flat.clone(), flat
    for _ in range(ring.world_size - 1):
        sent = ring.shift(sent)
        total = total + sent
    total = ring.all_gather(total)[0] if ring.world_size > 1 else total
    return [total[b : b + w.numel()].reshape(w.shape).to(w.dtype) for b, w in zip(begins, weights, strict=True)]


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring, x, lengths):
        ctx.ring, ctx.lengths = ring, lengths
        shapes = [(x.shape[0], length, x.shape[2]) for length in lengths]
        return torch.cat(ring.all_gather(x.detach().contiguous(), shapes), dim=1)

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.ring.all_reduce(grad.contiguous()).split(ctx.lengths, dim=1)[ctx.ring.rank], None


def decoder(ring, w, tokens, positions, owned):
    x = w["embedding"][tokens]
    q, k, v = turn(x @ w["q"], positions), turn(x @ w["k"], positions), x @ w["v"]
    k, v = Gather.apply(ring, torch.cat([k, v], dim=-1), [len(own) for own in owned]).chunk(2, dim=-1)
    hidden = owned[ring.rank][:, None] < torch.cat(owned)[None]
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return (x + scores.softmax(-1) @ v @ w["out"]) @ w["embedding"].mT


def training_step(ring, weights, tokens, counts, owned, rate):
    names = list(weights)
    values = [weights[name].detach().clone().requires_grad_(True) for name in names]
    own, labels, positions = shard_batch(tokens, counts, owned[ring.rank])
    logits = decoder(ring, dict(zip(names, values, strict=True)), own, positions, owned)
    share = loss_share(ring, logits, labels)
    share.backward()
    summed = sum_gradients(ring, values, [x.grad for x in values])
    loss = sum(float(x) for x in ring.all_gather(share.detach().view(1)))
    with torch.no_grad():
        return loss, {name: weights[name] - rate * g for name, g in zip(names, summed, strict=True)}
