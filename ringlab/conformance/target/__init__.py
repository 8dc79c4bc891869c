"""The target of a check: a ring attention with its claims, and how it is called.

A plain function is enough if its parameters have the usual names. Each of these arguments is passed by name
if the function has a parameter for it:

    q k v            this rank's shards, (B, H, L, D) and (B, K, L, D), or in the order of `axes`
    ring, comm       ringlab's Ring or Comm of this rank, for functions over these
    group            the default group, for functions over torch.distributed
    rank world_size  the number of this rank, and of all ranks
    causal           or is_causal; the mask is in global positions
    layout           the ringlab Layout if ringlab has this layout, else the layout's name
    positions        a list with the global positions of each rank's tokens, int64 tensors
    scale            or softmax_scale; None means D^−½
    return_lse       True
    qkv, kv          q, k and v, or k and v, stacked on an axis before the heads: (B, L, 3, H, D) for "BLHD"
    window cu_seqlens sinks …   further arguments for which the function has parameters (see `argument_names`)
    dout out lse     only for `gradients`: the gradient of out, and the results of the forward

If the function has no parameters q, k and v, its first three required parameters with unknown names get these
tensors. The function returns out, or (out, lse, …); gradients come from autograd, or from `gradients`, a
function that returns (dq, dk, dv).
"""
