"""Linear attention of one chunk of tokens: its passage of a state, its outputs, and its gradients.

The recurrence of `ringlab.scan.oracle` goes from token to token. A chunk of C tokens gives the same result by
a few products of matrices. S is the state that enters the chunk, row i of a matrix belongs to token i, and
the decay gives the factors

    E_ij = e^(g_{j+1} + … + g_i), j ≤ i       e_i = e^(g_1 + … + g_i)       f_j = e^(g_{j+1} + … + g_C)

The tokens write the rows of U, read the rows of O, and leave the state S':

    U = V,  or  (I + A) U = β∘(V − e∘(K S)),  A_ij = β_i E_ij k_i·k_j for j < i      (UT transform, arXiv 2406.06484)
    O = scale · (e∘(Q S) + (E∘QKᵀ) U)                S' = e_C S + (f∘K)ᵀ U

Any chunk length gives the same numbers up to rounding. All computation is in the state dtype, float32 at
least. Logarithms are only added: sums of logarithms are never subtracted from each other. A strong decay
therefore costs no digits of a weak decay, and a decay of −inf, which forgets everything, is exact.

The gradients, where G' is the gradient of S':

    dU = scale (E∘QKᵀ)ᵀ dO + (f∘K) G',  then with β  (I + A)ᵀ dR = dU
    G  = e_C G' + scale (e∘Q)ᵀ dO,      with β  − (β∘e∘K)ᵀ dR
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.merge import state_dtype
from ringlab.types import Gate, Keys, State, Values


class Tokens(NamedTuple):
    """Adjacent tokens of one document; head h of v uses head h // (H // K) of q and k.

    decay: natural logarithms, or None without decay. beta: None without the delta rule.
    """

    q: Keys
    k: Keys
    v: Values
    decay: Gate | None
    beta: Gate | None

    def rows(self, rows: slice) -> Tokens:
        """Return the tokens in `rows`."""
        q, k, v = (x[..., rows, :] for x in (self.q, self.k, self.v))
        decay, beta = (None if x is None else x[..., rows] for x in (self.decay, self.beta))
        return Tokens(q, k, v, decay, beta)

    def widened(self) -> Tokens:
        """Return the tokens in the state dtype, with q and k repeated for each head of v."""
        dtype, shared = state_dtype(self.q.dtype), self.v.shape[1] // self.q.shape[1]
        q, k = (x.to(dtype).repeat_interleave(shared, dim=1) for x in (self.q, self.k))
        decay, beta = (None if x is None else x.to(dtype) for x in (self.decay, self.beta))
        return Tokens(q, k, self.v.to(dtype), decay, beta)


class TokenGradients(NamedTuple):
    """The gradients of `Tokens`. ddecay exists even without decay; dbeta is None without the delta rule."""

    dq: Keys
    dk: Keys
    dv: Values
    ddecay: Gate
    dbeta: Gate | None


@dataclass(frozen=True)
class Chunk:
    """One chunk: its widened tokens, and the factors of the module's formulas that depend on no state.

    between: E, with zeros above its diagonal. since: e. until: f. coupling: A, with the delta rule only.
    """

    tokens: Tokens
    between: Float[Tensor, "B H C C"]
    since: Float[Tensor, "B H C 1"]
    coupling: Float[Tensor, "B H C C"] | None

    @classmethod
    def of(cls, tokens: Tokens) -> Chunk:
        """Return the chunk of these tokens, which must be widened."""
        k, beta = tokens.k, tokens.beta
        decay = k.new_zeros(k.shape[:-1]) if tokens.decay is None else tokens.decay
        between = decay[..., None].expand(*decay.shape, decay.shape[-1]).tril(-1).cumsum(-2).exp().tril()
        coupling = None if beta is None else beta[..., None] * (between * (k @ k.mT)).tril(-1)
        return cls(tokens, between, decay.cumsum(-1).exp()[..., None], coupling)

    @property
    def until(self) -> Float[Tensor, "B H C 1"]:
        """Return f: the fraction of each token's contribution that is left at the end of the chunk."""
        return self.between[..., -1, :, None]

    @property
    def whole(self) -> Float[Tensor, "B H 1 1"]:
        """Return e_C: the fraction of a state that is left at the end of the chunk."""
        return self.since[..., -1:, :]

    def write(self, state: State) -> Values:
        """Return U: the values that the tokens write if `state` enters the chunk."""
        _, k, v, _, beta = self.tokens
        if self.coupling is None or beta is None:
            return v
        missing = v - self.since * (k @ state)
        return _solve(self.coupling, beta[..., None] * missing)

    def leave(self, state: State, written: Values) -> State:
        """Return S': the state after the last token."""
        return self.whole * state + (self.until * self.tokens.k).mT @ written

    def read(self, state: State, written: Values) -> Values:
        """Return the outputs O without the factor `scale`."""
        q, k = self.tokens.q, self.tokens.k
        return self.since * (q @ state) + (self.between * (q @ k.mT)) @ written

    def write_back(self, dout: Values, dleft: State) -> Values:
        """Return dR with the delta rule, or dU without it.

        dout: the scaled gradient of the outputs. dleft: G', the gradient of the state that leaves.
        """
        q, k = self.tokens.q, self.tokens.k
        dwritten = (self.between * (q @ k.mT)).mT @ dout + (self.until * k) @ dleft
        return dwritten if self.coupling is None else _solve(self.coupling, dwritten, transposed=True)

    def enter_back(self, dout: Values, dleft: State, dwritten: Values) -> State:
        """Return G, the gradient of the state that enters; `dwritten` is the result of `write_back`."""
        q, k, _, _, beta = self.tokens
        dentered = self.whole * dleft + (self.since * q).mT @ dout
        return dentered if beta is None else dentered - (beta[..., None] * self.since * k).mT @ dwritten

    def gradients(self, state: State, dout: Values, dleft: State) -> tuple[TokenGradients, State]:
        """Return the gradients of the tokens, and G. `dout` must be scaled.

        The gradient of g_l sums, over all pairs j < l ≤ i, the gradients of the logarithms of E_ij, e_i and
        f_j.
        """
        q, k, v, _, beta = self.tokens
        written, dwritten = self.write(state), self.write_back(dout, dleft)
        seen, dseen = self.between * (q @ k.mT), (dout @ written.mT).tril()
        kept, dkept = self.until * k, written @ dleft.mT
        dq = (dseen * self.between) @ k + self.since * (dout @ state.mT)
        dk = (dseen * self.between).mT @ q + self.until * dkept
        dpairs = dseen * seen
        dpairs[..., -1, :] += (kept * dkept).sum(-1)
        dsince = (dout * self.since * (q @ state)).sum(-1)
        dsince[..., -1] += (self.whole * state * dleft).sum((-1, -2))
        dv, dbeta = dwritten, None
        if self.coupling is not None and beta is not None:
            # The delta rule adds the gradients through the value that each token reads before it writes.
            held = self.since * (k @ state)
            dcoupling = -(dwritten @ written.mT).tril(-1)
            left_over = v - held - (self.between * (k @ k.mT)).tril(-1) @ written
            weighted = dcoupling * self.between * beta[..., None]
            dv = beta[..., None] * dwritten
            dbeta = (dwritten * left_over).sum(-1)
            dk = dk + weighted @ k + weighted.mT @ k - self.since * (dv @ state.mT)
            dpairs = dpairs + dcoupling * self.coupling
            dsince = dsince - (dv * held).sum(-1)
        ddecay = _suffix_sums(dsince, -1) + _suffix_sums(dpairs, -2).tril(-1).sum(-1)
        return TokenGradients(dq, dk, dv, ddecay, dbeta), self.enter_back(dout, dleft, dwritten)


def _solve(coupling: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """Return the solution of (I + A) X = right, or of (I + A)ᵀ X = right."""
    matrix = coupling.mT if transposed else coupling
    return torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)


def _suffix_sums(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)
