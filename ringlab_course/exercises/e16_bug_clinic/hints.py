"""Hints of exercise 16."""

from __future__ import annotations

HINTS = {
    "ash": (
        "In the smallest case, which rows are NaN? And what do just these rows see of the block that is here?",
        "Its maximum is −∞, and −∞ − (−∞) is NaN. Such a row must add nothing: weights 0 and an lse of −∞. Subtract something finite in its place, and take care where a sum of 0 divides.",
        r"$m = \max_j s_j,\quad m' = 0$ where $m = -\infty$, else $m;\quad w_j = e^{s_j - m'},\quad L = m' + \log \sum_j w_j = -\infty$ there",
    ),
    "birch": (
        "On paper: two ranks with two tokens each, no mask, all scores 0 and all values 1. What should out be, and what is it after each block?",
        "After every block out is a mean, no sum. Make it a sum again, by the sum of weights that it was divided by, before you add to it. That sum shrinks, too, when the maximum rises.",
        r"$o' = \dfrac{o\,\ell\,e^{m - m'} + \sum_j w_j v_j}{\ell'},\qquad \ell' = \ell\,e^{m - m'} + \sum_j w_j$",
    ),
    "cedar": (
        "In the smallest case, write down each rank's tokens. Which query should see which key, and which one does?",
        "Rank 1 of 2, striped, has the tokens 1, 3, 5: token 1 does not see all of rank 0's. There is a helper that compares positions. No block may be skipped by its rank alone.",
        r"query $i$ of rank $r$ sees key $j$ of rank $o$ $\Leftrightarrow p_r[i] \ge p_o[j]$",
    ),
    "elm": (
        "Count the messages for 2, 3 and 4 ranks, and read what each of them brings. Which one would nobody miss?",
        "Attend P times, shift P − 1 times.",
        r"$\sum_{t=0}^{P-2}$ of the blocks of $r - t$: the block of $r + 1$ is attended to, and not sent on",
    ),
    "fir": (
        "On two ranks, in time order: what does each one send, and what does each one think that it receives?",
        "Who goes first may differ from rank to rank. What goes first may not: a message is told apart by its place in the order alone.",
        r"for every rank: $K$ before $V$, in what is sent and in what is received",
    ),
    "hazel": (
        "Follow one block and its sums on paper, three ranks, step by step. Where is the block, and where are the sums?",
        "Send the couriers the way of the blocks. Then count: where is courier r after P − 1 hops, and where does it belong?",
        r"after $t$ hops to the next rank: block $o$ and its courier on $(o + t) \bmod P$; home after $t = P$",
    ),
    "larch": (
        "Print dq after the first block, and again before anything is added to it in the second step. What has changed it?",
        "x.to(dtype) returns x itself if x has that dtype. Two tensors must not lie in one memory if one of them is written later. Give the sum memory of its own, in the dtype of lse, whatever comes in.",
        r"$dQ = \sum_t dQ_t$, with $dQ_t$ overwritten at every step: the memory of $dQ$ and that of $dQ_t$ have nothing in common",
    ),
    "oak": (
        "In every step, print the first key of what is computed with and of what is sent on. Whose are they?",
        "In step t the mask is that of origin(t). The block computed with must be the one of origin(t), too, and the one that is sent on as well.",
        r"step $t$: $(K, V)_{(r - t) \bmod P}$, in the scores, in $dQ$, and on its way to $r + 1$",
    ),
}
"""By patient: a question, a direction, a line of mathematics."""
