"""The parameter names that are in use for attention's arguments, so that a target may have any of them."""

from __future__ import annotations

GROUPS = ("group", "process_group", "cp_group", "ring_pg")
AROUND = ("ring", "comm", *GROUPS, "rank", "world_size")
CU_SEQLENS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens_q", "cu_seq_lens_k")
OF_KEYS = ("_k", "_kv")
"""The endings of the names of lengths that belong to keys."""
CU_PADDED = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_k_padded", "cu_seqlens_kv_padded")
MAX_SEQLENS = ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv")
IDS = ("segment_ids", "document_ids", "sequence_ids", "doc_ids")
"""The number of each token's document: (L,), or (B, L) if documents differ between sequences."""
PACKING = (*CU_SEQLENS, *CU_PADDED, *MAX_SEQLENS, *IDS, "position_ids")
PLAIN = frozenset(
    {*AROUND, "causal", "is_causal", "layout", "positions", "scale", "softmax_scale", "return_lse", "qkv", "kv", *PACKING}
)  # fmt: skip
"""The arguments of a plain call besides q, k and v. Arguments for packed documents are passed only if they
are required."""
GRADIENTS_OF = frozenset({"dout", "out", "lse"})
"""The arguments that `gradients` may take in addition to those of a plain call."""
THROUGH = ("sliding_window", "softcap", "s_aux")
"""Arguments that a function with `**kwargs` gets too, because code that ignores them would compute another
attention."""

WINDOWS = ("window", "sliding_window", "window_left", "window_size")
"""`window` counts the row's own key, `window_left` the keys before it, and `window_size` is (left, right)."""
SIDES = ("window_size",)
"""The names that take both sides of a window, of which −1 is no limit."""
SOFTCAPS = ("softcap", "soft_cap", "logits_soft_cap", "logit_cap", "attn_logit_softcapping")
PREFIXES = ("prefix", "prefix_len", "prefix_length")
"""The number of keys at the start of the sequence that every row sees, even under a causal mask."""
SINKS = ("sinks", "sink", "s_aux", "attention_sinks", "learnable_sink")
"""A logit for each query head, (H,), in the dtype of q."""
DOCUMENTS = (*CU_SEQLENS, *IDS)
PADDING = ("key_padding_mask", "padding_mask")
"""A mask (B, L) that is True for padding; `attention_mask` is 1 for the other tokens."""
VALID = ("attention_mask",)
ALIBI = ("alibi_slopes",)
"""A float32 slope for each query head, (H,), by which a score falls for each token from query to key."""
BIASES = ("attn_bias", "attention_bias")
"""A number for each head, row of this rank and key of the whole sequence, (B, H, L, S), that is added to the score."""
FLEX_MASKS = ("mask_mod", "block_mask")
"""FlexAttention's mask over the whole sequence: a function of (batch, head, row, key), or the BlockMask made of it."""
FLEX_SCORES = ("score_mod",)
"""FlexAttention's function of (score, batch, head, row, key); rows and keys count in the whole sequence."""
JOINT_KEYS = ("joint_tensor_key", "joint_key", "joint_k")
JOINT_VALUES = ("joint_tensor_value", "joint_value", "joint_v")
"""Keys and values that every rank holds and that count once; `joint_strategy` is "front" or "rear"."""
DROPOUTS = ("dropout", "dropout_p")
SEEDS = ("seed", "dropout_seed")
SCALES = ("scale", "softmax_scale")
TRAINED = {"sinks": SINKS, "additive bias": BIASES, "ALiBi slopes": ALIBI, "scale": SCALES}
"""The arguments that a model may learn, so that they need a gradient."""
NEUTRAL = {
    **dict.fromkeys(SOFTCAPS, 0.0), **dict.fromkeys(SIDES, (-1, -1)), "window_left": -1, **dict.fromkeys(PREFIXES, 0),
    **dict.fromkeys(DROPOUTS, 0.0),
}  # fmt: skip
"""The numbers with which code switches an argument off, as flash-attn's functions have them by default."""
