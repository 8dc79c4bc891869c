"""What is checked: a ring attention with its claims, and how it is called.

A bare function is enough if its arguments have the usual names. Each argument is passed by name if the
function has it:

    q k v            this rank's shards, (B, H, L, D) and (B, K, L, D), or as `axes` says
    ring, comm       ringlab's Ring or Comm of this rank, for functions over those
    group            the default group of torch.distributed, for functions over that
    rank world_size  of this rank
    causal           or is_causal; the mask is in global positions
    layout           the ringlab Layout, for layouts that ringlab knows, else the layout's name
    positions        a list with the global positions of each rank's tokens, int64 tensors
    scale            or softmax_scale; None stands for D^−½
    return_lse       True
    qkv, kv          in place of q, k and v, or of k and v: stacked before the heads, (B, L, 3, H, D) for "BLHD"
    window cu_seqlens sinks …   what else the function has a parameter for (see `argument_names`)
    dout out lse     for `gradients` only: of the loss, and what the forward gave

The first three required parameters with other names are taken for q, k and v. The function returns out,
or (out, lse, …); gradients come from autograd, or from `gradients`, a function that returns (dq, dk, dv).
"""
