"""Texts of exercise 16: what is said of a chart with another name, of a patient that is half mended, and hints."""

from __future__ import annotations

CLUES = {
    "ash": "some rows are NaN and none is merely wrong. Which arithmetic gives NaN, and from what?",
    "birch": "lse is right to the last digit and out is not. So which of the two sums of the softmax is right?",
    "cedar": "nothing is NaN and contiguous shards are well. What do ranks and positions have in common there, and only there?",
    "elm": "every value is right. Only a meter shows anything: how much more is sent than needed, for each number of ranks?",
    "fir": "look at the errors by rank, on two ranks without a mask: who is right, and what did the other one receive?",
    "hazel": "dQ is right, dK and dV are well on two ranks and ill on three. What is the same on two ranks and not on three?",
    "larch": "the very same program is well in bfloat16. What does a conversion do that has nothing to convert?",
    "oak": "all three gradients are ill as soon as there is a second block. What would dQ be if the second block were the first?",
}
"""What in the evidence speaks against another fault; not what the fault is."""
TAKEN_FOR = {
    (
        "ash",
        "lost sum",
    ): "a sum that is lost makes numbers too large or too small, never NaN, and it would not ask for a layout.",
    (
        "ash",
        "masks by rank",
    ): "a query that sees too much, or too little, has a wrong number, not NaN. Here rows that are not NaN are right.",
    (
        "birch",
        "bf16 result",
    ): "one rounding to bfloat16 is an error of 10⁻³, in one result, on one rank too. Read how large this one is, and from how many ranks on.",
    (
        "birch",
        "mean over ranks",
    ): "then all of out would be too small by the same factor. Under the causal mask the tokens of rank 0 are right, on any number of ranks.",
    (
        "fir",
        "first block",
    ): "then every rank would be wrong from two ranks on. Without a mask, which ranks are right on two?",
    (
        "fir",
        "masks by rank",
    ): "a mask that is wrong makes nobody ill who has none. This patient is ill without one, and well in its smallest case with one.",
    (
        "fir",
        "sent for received",
    ): "then every rank would go on with its own block, and all would be wrong. Some are right here.",
    (
        "larch",
        "bf16 result",
    ): "an error of 10⁻³ would be one rounding to bfloat16. This one is about as large as dQ, and on one rank there is none.",
    (
        "larch",
        "delta of the block",
    ): "delta goes into dK as it goes into dQ, and dK is right; nor would bfloat16 be well.",
}
"""By patient and the fault that it was taken for: what in the evidence speaks against that very one."""
HALF = {
    "ash": {
        "minus_ten_thousand": "the NaN is gone and the fault is not: hidden keys have a score of −10,000 now, and where true scores are lower than that, they win. Hidden is −∞; it is the subtraction that needs care.",
        "nan_to_zero": "NaN is written over at the end. What those rows had seen in other blocks is lost with it: they are 0 now, as if they saw nothing. It must not arise.",
        "skips_what_is_partly_hidden": "a block is skipped now as soon as one row sees nothing of it, and the other rows lose keys that they do see.",
    },
    "birch": {
        "old_sum_not_rescaled": "the old sum counts again, but still measured against the old maximum. When the maximum rises, everything from before shrinks: the sum, and what it multiplies.",
        "new_sum_for_the_old": "what was there is weighed with the new sum, in which this block is counted already. It had been divided by the old one: multiply by that, before it changes.",
        "never_divides": "out is not divided at all any more. Divide once, at the end; or undo the division before more is added.",
    },
    "cedar": {
        "striped_alone": "it masks as if every layout were striped. Which tokens a rank holds is told by `positions`, and by nothing else.",
        "skips_by_rank": "the mask is that of positions now, and blocks of later ranks are skipped as before. In a balanced layout a later rank holds earlier tokens, too.",
    },
    "elm": {
        "drops_the_last_block": "the loop has one turn fewer, and the last block is lost. P blocks are attended to, and P − 1 of them travel.",
        "drops_the_only_block": "the loop has one turn fewer: the last block is lost, and on one rank that is the only one. P blocks are attended to, and P − 1 of them travel.",
    },
    "fir": {
        "mended_for_even_numbers": "right where the neighbours of even ranks are odd. With an odd number of ranks the last and the first are both even, and these two mix K and V up now.",
        "mended_on_the_side_that_is_well": "K and V change places on the odd ranks now, which were right: they received in the order in which even ranks send. Which rank sends in another order than its neighbour receives?",
    },
    "hazel": {
        "ends_at_the_neighbour": "dK and dV go the right way and stop where K and V stop, one rank before home. They need one hop more than the blocks.",
    },
    "larch": {
        "float32_whatever_comes": "the sum has memory of its own, but it is float32 also where lse is float64: half of the digits are gone.",
        "last_block_alone": "dQ is that of the last block alone: every step writes over what the others had left. It is a sum over all blocks.",
        "shared_until_the_second_step": "nothing is added in place any more, but the sum still begins as the scratch tensor itself, and the second step writes over it: the first block's part is lost.",
    },
    "oak": {
        "one_step_late": "what arrives is used, but a step too late: the mask is that of one block, and K and V are those of the one before.",
        "sends_its_own_again": "what arrives is used, and what is sent is the rank's own block, in every step: from three ranks on the third block never comes. Send on what has arrived.",
    },
}
"""By patient: mistakes in mending it, and what to tell. `e16_half_mended` makes them."""

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
