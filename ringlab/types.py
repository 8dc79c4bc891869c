"""The legend of axis letters, and the array types that annotations use.

    B  batch                     L  local sequence (tokens of one rank or tile)
    H  query heads               S  global sequence (tokens of all ranks)
    K  key/value heads, H % K == 0
    D  head dim                  P  ranks (world size)
    Dv head dim of v, if it differs from D

Tensors are (B, H, L, D): batch, heads, tokens, head dim. `Lq` and `Lk` are the lengths of
a query and a key block. lse is (B, H, L), a natural logarithm.
"""

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

Query: TypeAlias = Float[Tensor, "B H Lq D"]
KeyValue: TypeAlias = Float[Tensor, "B K Lk D"]
Value: TypeAlias = Float[Tensor, "B K Lk Dv"]
Out: TypeAlias = Float[Tensor, "B H Lq Dv"]
BlockTensor: TypeAlias = Float[Tensor, "B K Lk _"]
"""K or V of a block, or a tensor from which they are made on arrival."""
RowState: TypeAlias = Float[Tensor, "B H Lq"]
Sinks: TypeAlias = Float[Tensor, " H"]

# Linear attention: several heads of v may share a head of q and k, and each head of v has a state.
Keys: TypeAlias = Float[Tensor, "B K L D"]
Values: TypeAlias = Float[Tensor, "B H L Dv"]
Gate: TypeAlias = Float[Tensor, "B H L"]
State: TypeAlias = Float[Tensor, "B H D Dv"]
