"""Texts of the stages 16.ash to 16.oak: titles, hints, and what is said of a patient that is half mended."""

from __future__ import annotations

TITLES = {
    "ash": "Ash, mended: a forward without NaN",
    "birch": "Birch, mended: a running softmax",
    "cedar": "Cedar, mended: a mask for any layout",
    "elm": "Elm, mended: no byte too many",
    "fir": "Fir, mended: an order that keeps K and V apart",
    "hazel": "Hazel, mended: gradients that find home",
    "larch": "Larch, mended: a sum of its own",
    "oak": "Oak, mended: the block that is here",
}
HALF = {
    "ash": (
        "minus_ten_thousand",
        "the NaN is gone and the fault is not: hidden keys have a score of −10,000 now, and where true scores are lower than that, they win. Hidden is −∞; it is the subtraction that needs care.",
    ),
    "birch": (
        "old_sum_not_rescaled",
        "the old sum counts again, but still measured against the old maximum. When the maximum rises, everything from before shrinks: the sum, and what it multiplies.",
    ),
    "cedar": (
        "striped_alone",
        "it masks as if every layout were striped. Which tokens a rank holds is told by `positions`, and by nothing else.",
    ),
    "elm": (
        "drops_the_last_block",
        "the loop has one turn fewer, and the last block is lost. P blocks are attended to, and P − 1 of them travel.",
    ),
    "fir": (
        "mended_for_even_numbers",
        "right where the neighbours of even ranks are odd. With an odd number of ranks the last and the first are both even, and these two mix K and V up now.",
    ),
    "hazel": (
        "ends_at_the_neighbour",
        "dK and dV go the right way and stop where K and V stop, one rank before home. They need one hop more than the blocks.",
    ),
    "larch": (
        "float32_whatever_comes",
        "the sum has memory of its own, but it is float32 also where lse is float64: half of the digits are gone.",
    ),
    "oak": (
        "one_step_late",
        "what arrives is used, but a step too late: the mask is that of one block, and K and V are those of the one before.",
    ),
}
"""By patient: the name of the mistake, and what to tell."""

HINTS = {
    "ash": (
        "A row that sees no key of a block: what is its maximum, and what is −∞ − (−∞)?",
        "Such a row must add nothing: weights 0 and an lse of −∞. Subtract something finite in its place, and take care where a sum of 0 divides.",
        r"$m = \max_j s_j,\quad m' = 0$ where $m = -\infty$, else $m;\quad w_j = e^{s_j - m'},\quad L = m' + \log \sum_j w_j = -\infty$ there",
    ),
    "birch": (
        "out is divided by the sum after every block. So what is it, before the next block is added: a sum of weighted values, or their mean?",
        "Make it a sum again, by the sum of weights that it was divided by, before you add to it. That sum shrinks, too, when the maximum rises.",
        r"$o' = \dfrac{o\,\ell\,e^{m - m'} + \sum_j w_j v_j}{\ell'},\qquad \ell' = \ell\,e^{m - m'} + \sum_j w_j$",
    ),
    "cedar": (
        "Rank 1 of 2, striped, has the tokens 1, 3, 5 and rank 0 has 0, 2, 4. Does token 1 see all of rank 0's keys?",
        "There is a helper that compares positions. No block may be skipped by its rank alone.",
        r"query $i$ of rank $r$ sees key $j$ of rank $o$ $\iff p_r[i] \ge p_o[j]$",
    ),
    "elm": (
        "What does the last shift bring, and who looks at it?",
        "Attend P times, shift P − 1 times.",
        r"$\sum_{t=0}^{P-2}$ of the blocks of $r - t$: the block of $r + 1$ is attended to, and not sent on",
    ),
    "fir": (
        "Write down for two ranks, in time order, what each one sends and what each one thinks that it receives.",
        "Who goes first may differ from rank to rank. What goes first may not: a message is told apart by its place in the order alone.",
        r"for every rank: $K$ before $V$, in what is sent and in what is received",
    ),
    "hazel": (
        "The sum for block o has to be on a rank at the same time as block o. Where is block o after t steps?",
        "Send the couriers the way of the blocks. Then count: where is courier r after P − 1 hops, and where does it belong?",
        r"after $t$ hops to the next rank: block $o$ and its courier on $(o + t) \bmod P$; home after $t = P$",
    ),
    "larch": (
        "What does x.to(dtype) return if x has that dtype already? Print the data_ptr of both.",
        "Two tensors must not lie in one memory if one of them is written later. Give the sum memory of its own, in the dtype of lse, whatever comes in.",
        r"$dQ = \sum_t dQ_t$, with $dQ_t$ overwritten at every step: the memory of $dQ$ and that of $dQ_t$ have nothing in common",
    ),
    "oak": (
        "Two names for a block: which one is sent on, and which one is computed with?",
        "In step t the mask is that of origin(t). The block computed with must be the one of origin(t), too, and the one that is sent on as well.",
        r"step $t$: $(K, V)_{(r - t) \bmod P}$, in the scores, in $dQ$, and on its way to $r + 1$",
    ),
}
"""By patient: a question, a direction, a line of mathematics."""
