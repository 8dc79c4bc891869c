# expects: check=13.report:mfu misconception=multiply_adds

def report(run):
    P, D = run["ranks"], run["head_dim"]
    one, ring = (S * (S + 1) / 2 if run["causal"] else S * S for S in run["tokens"])
    alone_s, ring_s = run["seconds"]
    efficiency = alone_s * ring / one / (P * ring_s)
    flops = ring * run["heads"] * D * (7 if run["backward"] else 2)
    peak = run["peak_tflops"] * 1e12 / (2 if run["sparse"] else 1)
    hop = 2 * run["tokens"][1] / P * run["kv_heads"] * D * run["element_bytes"]
    link = hop / run["hop_s"] / (run["link_gb_per_s"] * 1e9 / run["directions"])
    return efficiency, flops / ring_s / (P * peak), link
