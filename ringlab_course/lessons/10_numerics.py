# %% [markdown]
# # 10 · Numerics
#
# **Afterwards you can** say what must be float32 in ring attention and why, read an error curve, and choose a tolerance
# instead of guessing one.
#
# **You need first** [lesson 03](03_tiled_attention.ipynb), the backward from lse and delta, and
# [lesson 05](05_emulated_ring.ipynb), the ring on virtual ranks.
#
# **Minutes** 60, of which the machine works for less than one.
#
# "Bit-for-bit identical to full attention", say some about ring attention. "An approximation", say others. Both can be
# settled by measuring. What you learn on the way is worth more: how wrong a *right* program may be, and how to find the
# one number in it that somebody rounded.

# %%
import math

import torch

from ringlab import VirtualCluster, contiguous, launch, oracle, ring_attention
from ringlab.blocks import get_block
from ringlab.blocks.protocol import BackwardRows
from ringlab.conformance import tolerance
from ringlab_course import compare, predict
from ringlab_course.figures import error_curves
from ringlab_course.figures import error_curves
from ringlab_course.figures.error_curves import DTYPES, FAULTS, PROBES
from ringlab.viz.style import show

torch.set_num_threads(1)

# %% [markdown]
# ## 1 · Three numbers on paper
#
# Take a computer that keeps three decimal digits. Add 100, 0.4 and 0.4:
#
# - from the left: 100 + 0.4 = 100.4, kept as 100; and again + 0.4: **100**;
# - small ones first: 0.4 + 0.4 = 0.8, and 100 + 0.8 = 100.8, kept as **101**.
#
# Every step was rounded as well as three digits allow, and two orders give two results. Addition on a computer is
# commutative but not *associative*. float32 keeps 24 binary digits, so it can count up to 2²⁴ = 16,777,216 without a gap.

# %% tags=["nbval-ignore-output"]
predict(
    "10.three",
    "float32: (16,777,216 + 1) + 1 is larger than 16,777,216 by how much?",
)

# %%
big, one = torch.tensor(2.0**24), torch.tensor(1.0)
compare("10.three", ((big + one) + one - big).item())
print("small ones first:", (big + (one + one) - big).item())

# %% [markdown]
# ## 2 · The ring is another order
#
# One device adds up a row's keys in one order. Eight ranks add up each block by itself and merge the results, and each
# rank starts with its own block. So the bits need not agree. How many of them do not?


# %%
def ring(qkv, P, block="blockwise"):
    """Attention on P virtual ranks, in the order of the sequence."""
    layout = contiguous(qkv[0].shape[2], P)

    def program(ring):
        shards = layout.shard(qkv, ring.rank)
        return ring_attention(*shards, ring=ring, layout=layout, causal=False, block=block)

    return layout.unshard(VirtualCluster(P).run(program).results)


torch.manual_seed(10)
q, k, v, dout = (torch.randn(1, 2, 512, 64) for _ in range(4))
dout = dout / 512  # as for a loss that is a mean over tokens
true = tolerance.truth(q, k, v, dout)

# %% tags=["nbval-ignore-output"]
predict(
    "10.bits", "8 ranks against 1, float32: what percentage of the output's numbers differ at all?", unit="%"
)

# %% tags=["nbval-ignore-output"]
alone, eight = ring((q, k, v), 1), ring((q, k, v), 8)
compare("10.bits", 100 * (alone != eight).double().mean().item())


# %%
def error(x, right):
    """Relative error: the norm of the difference over the norm of the truth."""
    x, right = x.double(), torch.as_tensor(right)
    return ((x - right).norm() / right.norm()).item()


print("more than half of the numbers differ:", (alone != eight).double().mean().item() > 0.5)
off = error(alone, true.out), error(eight, true.out)
print("but both are within 1e-6 of the truth:", off[0] < 1e-6, off[1] < 1e-6)
print("neither is twice as far off as the other:", max(off) < 2 * min(off))

# %% [markdown]
# Most numbers differ, and neither run is the better one: both are about equally far from the float64 truth. So **not bit for
# bit, and no approximation either**. An approximation has an error of its own, which more digits do not cure. This one
# falls with the digits:

# %%
double = tuple(x.double() for x in (q, k, v))
print("float64, 8 ranks: within 1e-14 of the truth:", error(ring(double, 8), true.out) < 1e-14)

# %% [markdown]
# ## 3 · How much is one rounding?
#
# The gap between neighbouring numbers near x is one *ulp*, a unit in the last place. Near 1 it is called **eps**, and
# rounding to the nearest number is off by half of it at most: the *unit roundoff*.

# %%
for name, dtype in DTYPES.items():
    info = torch.finfo(dtype)
    print(f"{name}: eps {info.eps:.1e}   unit roundoff {info.eps / 2:.1e}   largest number {info.max:.1e}")

# %% [markdown]
# bfloat16 is float32 with its tail cut off: the same range, 8 significant bits. float16 has 11, and pays with range.
#
# Take the exact output and round it to bfloat16, once. That is the least any program pays that hands out bfloat16.

# %% tags=["nbval-ignore-output"]
predict(
    "10.once",
    "The unit roundoff of bfloat16 is 3.9e-3. What relative error (norm over norm) does that one rounding cost?",
    ["about twice that", "about that", "about half of it", "about a hundredth of it"],
)

# %%
once = error(torch.from_numpy(true.out).bfloat16(), true.out)
print(f"one rounding to bfloat16: {once:.1e}")
share = once / 2**-8
names = {2.0: "about twice that", 1.0: "about that", 0.5: "about half of it", 0.01: "about a hundredth of it"}
compare("10.once", names[min(names, key=lambda guess: abs(math.log(share / guess)))])

# %% [markdown]
# Less than half of the unit roundoff, which is the worst a number can meet, and most meet less. Keep 1.7e-3 in mind. It is
# the yardstick for all that follows.
#
# ## 4 · Does the error grow with P?
#
# Inputs in bfloat16, and each of P blocks returns its *part's* out in bfloat16, as a fast kernel may. The state, the *running* out and
# lse that are carried from block to block, is in float32. More blocks, more merges, more roundings?

# %% tags=["nbval-ignore-output"]
predict(
    "10.sound", "float32 state: by what factor is the error with 32 blocks larger than with 2?", unit="times"
)
predict(
    "10.lse",
    "And if the running lse is rounded to bfloat16 at every merge?",
    ["about 1", "about 4 = √16", "about 16"],
)

# %% tags=["nbval-ignore-output"]
plain = error_curves.panel("plain")
print("blocks           " + "".join(f"{P:9}" for P in plain.ranks))
for rounded in ("nothing", "out", "lse"):
    print(
        f"{'running ' + rounded if rounded != 'nothing' else 'nothing':17}"
        + "".join(f"{x:9.1e}" for x in plain.errors[rounded])
    )

# %%
compare("10.sound", round(plain.growth("nothing"), 1))
lse_times = plain.growth("lse")
names = {1.0: "about 1", 4.0: "about 4 = √16", 16.0: "about 16"}
print(f"running lse rounded: {lse_times:.1f} times")
compare("10.lse", names[min(names, key=lambda guess: abs(math.log(lse_times / guess)))])
print("and for the running out:", round(plain.growth("out"), 1), "times")
print("with 32 blocks:", ", ".join(f"{rounded} {x[-1]:.0e}" for rounded, x in plain.errors.items()))

# %% [markdown]
# **With a float32 state the error does not grow**: 1.6e-3 for one block, 1.7e-3 for 32. Each block was rounded once,
# the roundings have random signs, and the merge averages them. Why, then, does the error not fall? A part with fewer keys has a larger out, and so larger
# roundings: both go like √P and cancel. Here is the package's ring: with lesson 03's block, which keeps its out in float32, and with PyTorch's own fast one.

# %%
in_bf16 = tuple(x.bfloat16() for x in (q, k, v))
truth_bf16 = oracle.attention(*in_bf16).out
for block in ("blockwise", "native"):
    found = [error(ring(in_bf16, P, block), truth_bf16) for P in (2, 8, 32)]
    flat = max(found) < 1.2 * min(found)
    print(f"{block:9}  2 ranks: {found[0]:.0e}   equal to 20 % for 2, 8 and 32 ranks: {flat}")

# %% [markdown]
# Flat, both. The first pays for one rounding, that of its result. The fast one rounds its softmax weights as well, and
# pays for that, too. A *state* that is rounded at every merge is another matter.

# %%
panels = [error_curves.panel(probe) for probe in PROBES]
show(error_curves.figure(panels), error_curves.describe(panels))

# %% [markdown]
# Three kinds of inputs: scores of size 1; of size 8, where a few keys hold all weight; and scores that rise steadily along the keys. (In the
# middle the blue curve even falls: where one key has nearly all of a block's weight, the block's out is that key's v, and
# rounding a bfloat16 number to bfloat16 is free.) Read a curve by its
# *shape* first. Flat: the fault, if any, is not in the merges. Rising from P = 2 on: it is. Then by its *level*: lse lies
# several times above out. In a live notebook, choose inputs and dtype yourself (Tab goes from button to button, Space presses one):

# %% tags=["nbval-ignore-output"]
error_curves.play()

# %% [markdown]
# Why does out's error grow like √P? At merge n the state is rounded anew, by about the same fraction of itself. These
# errors are independent, so their *squares* add up. From 2 to 32 blocks that is up to √16 = 4 times; we measured 3.0.
#
# And why is lse so much worse? It stands in an exponent. If lse is off by δ, the block's whole weight is off by the
# factor $e^\delta \approx 1 + \delta$: an **absolute** error of lse becomes a **relative** error of everything it weighs. A large lse
# has a large ulp, and lse grows with the number of keys.

# %%
for S in (1024, 2**20):
    lse = math.log(S) + 0.5  # scores of size 1: the mean of e^s is e^½
    ulp = torch.finfo(torch.bfloat16).eps * 2 ** math.floor(math.log2(lse))
    percent = 100 * math.expm1(ulp / 2)
    print(f"{S:9,} keys: lse {lse:4.1f}, ulp in bf16 {ulp:.4f}, a weight is off by up to {percent:.1f} %")

# %% [markdown]
# For out, the same rounding is at most 0.4 % of each number (the unit roundoff), and signs cancel across a row's D numbers. A wrong
# weight shifts the whole row one way.
#
# In the right panel a rounded lse does no harm up to four blocks: scores rise so steeply that the last block holds nearly all weight, and a wrong
# weight of nothing is nothing. **A test with one kind of input, or one P, finds what that input shows.**
#
# ## 5 · The same bits, every time
#
# Rounding is not noise. The same operations in the same order give the same bits; only the order must be *fixed*. In
# ringlab it is: each rank starts with its own block and goes round the ring. If you merge blocks as they happen to
# arrive, it is not.

# %%
half = contiguous(512, 2)


def two_ranks(ring):
    return ring_attention(*half.shard((q, k, v), ring.rank), ring=ring, layout=half, causal=True)


virtual, real = VirtualCluster(2).run(two_ranks), launch(two_ranks, 2)
print("twice on virtual ranks, same bits:", torch.equal(ring((q, k, v), 8), eight))
print("virtual ranks and gloo processes:", all(map(torch.equal, virtual.results, real.results)))
# error_curves computes attention block by block with one named fault on purpose; here on 16 query rows
late = error_curves.curves("arrival order", (1, 8), rows=16)["repeat"]
print("merged as they arrive, two runs differ: 1 block", late[0] > 0, "  8 blocks", late[1] > 0)

# %% [markdown]
# Equal bits are a debugging tool: a change that should not alter results can be checked with `torch.equal`. They hold for
# one order, on one kind of machine. Across machines, and against one device, ask for *close*, and say how close.
#
# ## 6 · What must be float32
#
# In the backward, too, something is carried. dK and dV of a block collect a contribution on every rank: they travel along with their
# block, P hops (lesson 09). Lesson 03 gave the contributions, from the final lse and delta. Add them up on the way, in
# float32 or in bfloat16:


# %%
final_out, lse = (torch.from_numpy(x).float() for x in (true.out, true.lse))
delta = (dout * final_out).sum(-1)
block = get_block("blockwise", q)


def backward(rows):
    """What these query rows add to (dq, dk, dv)."""
    mine = dout[..., rows, :], q[..., rows, :]
    final = final_out[..., rows, :], lse[..., rows], delta[..., rows]
    return block.backward(BackwardRows(*mine, *final), k, v, causal=False, scale=0.125)


def travelled(P, dtype):
    """dk after P ranks have added their part, kept in `dtype` on the way."""
    parts = (backward(slice(i * 512 // P, (i + 1) * 512 // P))[1] for i in range(P))
    total = torch.zeros_like(k, dtype=dtype)
    for part in parts:
        total = (total.float() + part).to(dtype)
    return total


# %% tags=["nbval-ignore-output"]
predict(
    "10.courier",
    "dK travels in bfloat16 among 32 ranks: its error is how many times that of a single rounding?",
    ["about 1", "about √P", "about P"],
)

# %%
for P in (2, 8, 32):
    rounded, wide = error(travelled(P, torch.bfloat16), true.dk), error(travelled(P, torch.float32), true.dk)
    print(f"{P:2} ranks: dk in bf16 {rounded:.1e}   in fp32 below 1e-6: {wide < 1e-6}")
times = rounded / once
print(f"with 32 ranks: {times:.1f} times one rounding; √32 = {32**0.5:.1f}, √16 = {16**0.5:.1f}")
names = {1.0: "about 1", 32**0.5: "about √P", 32.0: "about P"}
compare("10.courier", names[min(names, key=lambda guess: abs(math.log(times / guess)))])

# %% [markdown]
# The same √P, a little below it: dK grows on its way, and the early roundings are those of a smaller sum. Their squares grow with the hop and
# add up to half of P, hence √(P/2).
#
# And delta? It is subtracted: with the softmax weights W, dS = W ∘ (dW − delta). Where dW and delta are alike, what is left is small, and
# the rounding of delta is not. Add 4 to every value, and dW and delta grow while their difference stays:

# %%
shifted = v + 4
near = tolerance.truth(q, k, shifted, dout)
near_out, near_lse = (torch.from_numpy(x).float() for x in (near.out, near.lse))
near_delta = (dout * near_out).sum(-1)
for name, used in (("float32", near_delta), ("bfloat16", near_delta.bfloat16().float())):
    rows = BackwardRows(dout, q, near_out, near_lse, used)
    dq = block.backward(rows, k, shifted, causal=False, scale=0.125)[0]
    off = error(dq, near.dq)
    print(f"delta in {name:8}: error of dq {'below 1e-5' if off < 1e-5 else f'{off:.0e}'}")

# %% [markdown]
# | quantity | float32 because |
# |---|---|
# | lse | it stands in an exponent: an absolute error is a relative error of a weight |
# | out or its accumulator, the sum ℓ | rounded at every merge or tile, the error grows like √ of their number |
# | delta | it is subtracted from something of its own size |
# | dK, dV on their way home | one rounding per hop, P hops |
#
# What may be bfloat16: q, k, v and dO, which travel and are multiplied but never accumulated into, and the final results, rounded once.
#
# ## 7 · Range, and three old friends
#
# float16 is eight times as exact as bfloat16. So why do models train in bfloat16?

# %%
for dtype in (torch.float16, torch.bfloat16):
    x = torch.tensor([300.0, 12.0, 256.0], dtype=dtype)
    print(
        f"{str(dtype)[6:]:8}   300 · 300 = {x[0] ** 2:7.0f}   e^12 = {x[1].exp():7.0f}   256 + 1 = {x[2] + 1:.0f}"
    )

# %% [markdown]
# float16 ends at 65,504: a score before scaling gets there, and so does an exponential without its maximum. bfloat16
# does not overflow, and cannot count to 257. **Overflow is loud, lost digits are silent.** Three traps on top. Two you have met; the third is
# new: fast kernels compute $2^x$ instead of $e^x$ and multiply scale · log₂e into q beforehand. `FAULTS` names programs with one fault
# each: `"sound"` has none, `"bf16 q"` rounds that product back to bfloat16.

# %%
nothing, values = torch.tensor(-math.inf), torch.tensor([1.0, 2.0, 3.0, 4.0])
print("1. logaddexp(-inf, -inf):", torch.logaddexp(nothing, nothing).item())
print("   the weight e^(-inf - -inf):", torch.exp(nothing - nothing).item())
print("2. a row that sees no key, masked with -1e9:", (torch.full((4,), -1e9).softmax(-1) @ values).item())
for name in ("sound", "bf16 q"):
    few, many = error_curves.errors(FAULTS[name], "large", (1, 8), gain=12.0)
    print(f"3. {name:7} large scores: {few:.0e} in one block, {many:.0e} in 8")

# %% [markdown]
# The first two you know from lesson 02: a part without mass has weight 0, by decree; and a finite mask turns "saw nothing" into the
# mean of V. In float32 the third
# is free. Rounded back to bfloat16, every score is off by a fraction of itself, and large scores by a lot. The
# error is flat in P: it sits before the merges.
#
# ## 8 · Choosing a tolerance
#
# Here is a test as found in the wild: `allclose(x, truth, atol=1e-2)`. Some backward passes for it: the right one, dK and dV mixed up,
# dK halved, nothing at all, and one whose results were rounded to bfloat16 on the way.

# %%
right = tolerance.plainest(q, k, v, dout)
gradients = {
    "right": right,
    "dk and dv mixed up": right._replace(dk=right.dv, dv=right.dk),
    "dk halved": right._replace(dk=right.dk / 2),
    "zeros": right._replace(**{name: 0 * getattr(right, name) for name in ("dq", "dk", "dv")}),
    "bf16 on the way": tolerance.Results(*(x.bfloat16().float() for x in right)),
}

# %% tags=["nbval-ignore-output"]
predict("10.atol", "How many of the four wrong ones pass allclose(atol=1e-2) for dq, dk and dv?", unit="of 4")


# %%
def passes(result, atol):
    """Whether dq, dk and dv all pass."""
    pairs = ((getattr(result, n), torch.from_numpy(getattr(true, n))) for n in ("dq", "dk", "dv"))
    return all(torch.allclose(x.double(), t, atol=atol) for x, t in pairs)


for name, result in gradients.items():
    far = max(error(getattr(result, n), getattr(true, n)) for n in ("dq", "dk", "dv"))
    print(
        f"{name:19} passes atol 1e-2: {passes(result, 1e-2)}   relative error {'below 1e-6' if far < 1e-6 else f'{far:.1g}'}"
    )
compare("10.atol", sum(passes(result, 1e-2) for result in gradients.values()) - passes(right, 1e-2))

# %% [markdown]
# All of them. With a loss that is a mean over tokens, gradients are tiny, and *zero* is within 1e-2 of anything tiny. An absolute tolerance does not know
# how large the numbers are. A relative one does, if measured well:

# %%
x, t = right.out.double(), torch.from_numpy(true.out)
entries = ((x - t).abs() / t.abs()).flatten()
print("the right output, norm over norm: below 1e-6:", error(right.out, true.out) < 1e-6)
print("the same, entry by entry, the worst: above 1e-4:", entries.max().item() > 1e-4)

# %% [markdown]
# Entry by entry even the right result looks bad, since some entry is nearly zero and its roundings are not. So set the norm of the
# error against the norm of the truth, or the largest error against the largest entry. A NaN must count as infinitely wrong: every comparison
# with it is false, so write the test as `error <= bound`, which fails, and not as `error > bound`, which lets it pass.
#
# What remains is *how much*. Do not guess: **measure how wrong an honest program is.** Take the plainest implementation, in
# the same dtype, on the same inputs; hold it against the float64 oracle; allow twice its error. `ringlab.conformance.tolerance` does that,
# for the largest error over the largest entry. For results that the plainest gets exactly right by luck it adds a floor of a rounding or two.

# %%
bounds = tolerance.bounds(q, k, v, dout, true=true)
print("bounds below 1e-5:", all(bound < 1e-5 for bound in bounds.values()))
for name, result in gradients.items():
    found = tolerance.errors(result, true)
    wrong = [n for n in tolerance.NAMES if not found[n] <= bounds[n]]
    print(f"{name:19} fails on: {', '.join(wrong) or 'nothing'}")

# %% [markdown]
# Every wrong one falls, and the right one passes, with a bound a thousand times below 1e-2. It scales with the inputs by itself: in bfloat16, or for
# large scores, the plainest errs more, and the bound follows.
#
# That is its limit, too. In bfloat16 a running out that is rounded at every merge is no worse, at 8 blocks, than the plainest bfloat16 attention is
# anyway:

# %%
inputs = [x.bfloat16() for x in error_curves.inputs("plain", 0)]
plainest = torch.softmax(inputs[0] @ inputs[1].T / 8, -1) @ inputs[2]
honest = error(plainest, error_curves.truth(*inputs))
few, many = error_curves.errors(FAULTS["bf16 out"], "plain", (8, 32))
print(f"plainest bf16 {honest:.0e}; running out in bf16 {few:.0e} at 8 blocks, {many:.0e} at 32")
print("8 blocks pass twice the plainest's error:", few <= 2 * honest)

# %% [markdown]
# A tolerance sees a level; **a curve sees a shape**. Test in float32, where a bfloat16 state sticks out by a factor of thousands, and
# watch the error against P. That is how you find the bug in the exercise.
#
# ## Recap
#
# - Floating-point sums depend on their order. A ring adds in another order than one device: other bits, the same accuracy.
# - One rounding to bfloat16 costs 1.7e-3. With a float32 state the ring's error stays there, whatever P is. A rounded out or
#   lse grows like √P, and lse costs more, as it stands in an exponent.
# - float32: lse, out and the sums, delta, dK and dV on their way. bfloat16: what is only multiplied, and the final result.
# - Fix the order of the merges, and virtual ranks, processes and tomorrow's run agree bit for bit.
# - Tolerance: relative, against float64, twice the plainest implementation's error in the same dtype. NaN fails.
#
# ## Self-check
#
# Answer without scrolling up, then open.
#
# <details><summary>1. Your ring and SDPA differ in the last digits. How do you find out which is wrong?</summary>Hold both against a
# float64 oracle. If both are about equally far off, neither is.</details>
#
# <details><summary>2. The error is the same for 1 and for 32 blocks, but three times too high on large scores. Where do you
# look?</summary>Before the merges: at q, the scale, the scores.</details>
#
# <details><summary>3. Somebody keeps lse in bfloat16 "to save memory". What does that save, with D = 128, and what does it
# cost?</summary>Two bytes beside 4 · 128 of out, for each row; and every weight is off by up to a percent or more.</details>
#
# <details><summary>4. A test passes at 1e-2 in bfloat16, and in float32 as well. What does the second one prove?</summary>Little: a
# bfloat16 state inside would pass, too. In float32 ask for what float32 can do.</details>
#
# **Now you:** [exercise 10](../exercises/10_numerics.ipynb): an error, a fold, a tolerance, and eight programs to diagnose.
