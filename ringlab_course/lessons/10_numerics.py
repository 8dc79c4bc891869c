# %% [markdown]
# # 10 · Numerics
#
# **Afterwards you can** say what must be float32 in ring attention and why, read an error curve, and choose a
# tolerance instead of guessing one.
#
# **You need first** [lesson 02](02_online_softmax.ipynb), the merge; [lesson 03](03_tiled_attention.ipynb), the backward;
# [lesson 05](05_emulated_ring.ipynb), the ring on virtual ranks; for section 6, [lesson 09](09_backward_ring.ipynb),
# couriers.
#
# **Minutes** 60, in two halves.
#
# Some say that ring attention is "bit-for-bit identical to full attention". Others call it "an approximation". Both are
# wrong. This lesson asks one question: **how wrong may a right ring be?** The first half measures it. The second half uses
# the answer to find faults.

# %%
import math

import torch

from ringlab import VirtualCluster, contiguous, ring_attention
from ringlab.blocks import get_block
from ringlab.blocks.protocol import BackwardRows
from ringlab.conformance import tolerance
from ringlab.merge import Partial, merge
from ringlab.viz.style import show
from ringlab_course import compare, predict
from ringlab_course.figures import error_curves, rounding
from ringlab_course.figures.error_curves import DTYPES
from ringlab_course.figures.rounding import Steps

torch.set_num_threads(1)


def nearest(x, names):
    """Return the name whose number is nearest to x, by its ratio."""
    return names[min(names, key=lambda number: abs(math.log(x / number)))]


# %% [markdown]
# # First half: how wrong a ring is
#
# ## 1 · Three numbers on paper
#
# The whole lesson follows from one fact, and paper is enough to see it. Take a computer that keeps three decimal digits.
# Add 100, 0.4 and 0.4:
#
# - from the left: 100 + 0.4 = 100.4, kept as 100; and again + 0.4: **100**;
# - small ones first: 0.4 + 0.4 = 0.8, and 100 + 0.8 = 100.8, kept as **101**.
#
# Two orders give two results: addition on a computer is not *associative*. float32 keeps 24 binary digits. It counts up to
# 2²⁴ = 16,777,216 without a gap.

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
# bfloat16 keeps only 8 binary digits, so the same happens at 2⁸ = 256. From 250 we add 1 again and again, and then 2.6.
# Each grey line is a number that bfloat16 has. After every addition the sum must choose the nearest line.


# %%
def walk(start, add, times):
    """The sums after each addition: exact, and kept in bfloat16."""
    kept = [torch.tensor(start).bfloat16()]
    for _ in range(times):
        kept.append((kept[-1].float() + add).bfloat16())
    return [start + n * add for n in range(times + 1)], [x.item() for x in kept]


panels = [
    Steps(f"250, then {add:g} added 12 times", "additions", "sum", *walk(250.0, add, 12))
    for add in (1.0, 2.6)
]
show(rounding.steps(panels), rounding.describe_steps(panels))

# %% [markdown]
# Above 256 the lines are 2 apart, and 257 is halfway between two of them. Such a tie goes to the number whose last bit is
# 0. That is 256, so the sum never leaves it. On the right the sum moves, but from 256 on every addition loses 0.6.
#
# ## 2 · A ring is another order
#
# A ring must round differently, because it adds in another order. One device adds up a row's keys from first to last. Eight
# ranks add up each block by itself and merge the results.


# %%
def run_ring(qkv, P):
    """Attention on P virtual ranks, in the order of the sequence."""
    layout = contiguous(qkv[0].shape[2], P)

    def program(ring):
        shards = layout.shard(qkv, ring.rank)
        return ring_attention(*shards, ring=ring, layout=layout, causal=False, block="blockwise")

    return layout.unshard(VirtualCluster(P).run(program).results)


# %% [markdown]
# The truth comes from ringlab's oracle, which computes in float64. All errors are relative: the norm of the difference over
# the norm of the truth. (`dout` is for section 6.)


# %%
def error(x, right):
    """Relative error: the norm of the difference over the norm of the truth."""
    x, right = x.double(), torch.as_tensor(right)
    return ((x - right).norm() / right.norm()).item()


torch.manual_seed(10)
q, k, v, dout = (torch.randn(1, 2, 512, 64) for _ in range(4))
dout = dout / 512  # as for a loss that is a mean over tokens
true = tolerance.truth(q, k, v, dout)

# %% tags=["nbval-ignore-output"]
alone, eight = run_ring((q, k, v), 1), run_ring((q, k, v), 8)
differ = (alone != eight).double().mean().item()
print(f"float32, 8 ranks against 1: {differ:.0%} of the numbers differ")
for ranks, found in ((1, alone), (8, eight)):
    print(f"P = {ranks}: relative error {error(found, true.out):.0e}")

# %% [markdown]
# The ring is **not bit-for-bit identical** to one device, but both are equally close to the truth. Is it an approximation?
# Run the same ring in float64, which has 29 more binary digits than float32.

# %% tags=["nbval-ignore-output"]
predict(
    "10.bits",
    "The same ring on 8 ranks in float64: its error is smaller than in float32 by a factor of …",
    ["about 1: the error is the ring's own", "about 29", "about 2²⁹, 500 million"],
)

# %%
double = tuple(x.double() for x in (q, k, v))
factor = error(eight, true.out) / error(run_ring(double, 8), true.out)
print(f"the error is smaller by a factor of about 2 to the {math.log2(factor):.0f}")
names = {1: "about 1: the error is the ring's own", 29: "about 29", 2**29: "about 2²⁹, 500 million"}
compare("10.bits", nearest(factor, names))

# %% [markdown]
# Each additional digit of the format is an additional digit of the result. So the ring is **not an approximation either**:
# its whole error is rounding.
#
# Rounding is not random. The same operations in the same order give the same bits:

# %%
rolled = q, k.roll(64, dims=2), v.roll(64, dims=2)  # 64 keys are a block: the next rank has it now
print("the same ring again, same bits:", torch.equal(run_ring((q, k, v), 8), eight))
print("the same blocks in another order, same bits:", torch.equal(run_ring(rolled, 8), eight))

# %% [markdown]
# ringlab fixes the order. A program that merges blocks as they happen to arrive may give other bits in every run.
#
# ## 3 · How much is one rounding?
#
# To judge an error we need a unit: a single rounding. Here is 100.4 as three formats keep it:

# %%
show(rounding.bits(100.4), rounding.describe_bits(100.4))

# %% [markdown]
# The fraction bits decide how exact a format is. (The first digit, a 1, is not stored.) The exponent bits decide how large a
# number may be.
#
# Three words measure the grey lines of section 1:
#
# - The gap between two neighbouring numbers is one *ulp*, a unit in the last place. It grows with the numbers.
# - The gap just above 1 is called **eps**.
# - Rounding is off by at most half a gap. Relative to the number, that is at most eps / 2, the *unit roundoff*.

# %%
for name, dtype in DTYPES.items():
    info = torch.finfo(dtype)
    half = f"unit roundoff {info.eps / 2:.1e}"
    print(f"{name}: eps {info.eps:.1e}   {half}   largest number {info.max:.1e}")

# %% [markdown]
# Take the exact output and round it to bfloat16, once. No program that returns bfloat16 can do better.

# %% tags=["nbval-ignore-output"]
predict(
    "10.once",
    "The unit roundoff of bfloat16 is 3.9e-3. What error, norm over norm, does one rounding cost?",
    ["about twice that", "about that", "about half of it", "about a hundredth of it"],
)

# %%
exact = torch.from_numpy(true.out)
rounded = exact.bfloat16()
once, gap = error(rounded, exact), (rounded.double() - exact).abs()
names = {2: "about twice that", 1: "about that", 0.5: "about half of it"}
compare("10.once", nearest(once / 2**-8, names | {0.01: "about a hundredth of it"}))
print(f"worst single number, error over the number: {(gap / exact.abs()).max().item():.1e}")
print(f"norm of the error over norm of the truth:   {once:.1e}")

# %% [markdown]
# The worst single number is off by the unit roundoff, **3.9e-3**. Most numbers are nearer to their line, so norm over norm
# is less than half of that: **1.7e-3**. From here on this is *one rounding*, our unit.
#
# ## 4 · Many roundings: the error against P
#
# A ring that carries a narrow number from block to block rounds it many times. How fast does the error grow?
#
# Each of P blocks of keys gives a *part*: its out, here in bfloat16, and its lse.


# %%
def blocks(q, k, v, P):
    """(out, lse) of each of P blocks of keys: out in bfloat16, lse in float32."""
    q, k, v = (x.float() for x in (q, k, v))
    for keys, values in zip(k.tensor_split(P), v.tensor_split(P), strict=True):
        scores = q @ keys.T * q.shape[-1] ** -0.5
        top = scores.amax(-1)
        powers = torch.exp(scores - top[:, None])
        total = powers.sum(-1)
        yield (powers @ values / total[:, None]).bfloat16(), top + total.log()


# %% [markdown]
# The *state* is the running out and lse. It is merged with one part after the other, and it has a dtype of its own.


# %%
def states(parts, out=torch.float32, lse=torch.float32):
    """The state after each part, if out and every lse are kept in these dtypes."""
    state = None
    for part_out, part_lse in parts:
        part = Partial(part_out.float(), part_lse.to(lse).float())
        state = merge(state, part) if state else part
        state = Partial(state.out.to(out).float(), state.lse.to(lse).float())
        yield state


# %% [markdown]
# The course's `error_curves` runs the same program on three inputs and takes the mean. One check:

# %%
narrow = torch.bfloat16
inputs = [x.to(narrow) for x in error_curves.inputs("plain", 0)]  # 64 queries, 1,024 keys
same = error_curves.run(error_curves.FAULTS["bf16 lse"], *inputs, 8)
mine = list(states(blocks(*inputs, 8), lse=narrow))[-1].out
print("error_curves computes the same bits:", torch.equal(mine, same))

# %% [markdown]
# Now round the running out to bfloat16 after every merge. More blocks mean more roundings.

# %% tags=["nbval-ignore-output"]
predict(
    "10.out",
    "The running out is rounded to bfloat16: from 2 to 32 blocks, the error grows by a factor of",
    ["about 1", "3 to 4", "about 16"],
)

# %% tags=["nbval-ignore-output"]
plain = error_curves.panel("plain")


def table(*names):
    print("blocks           " + "".join(f"{P:9}" for P in plain.ranks))
    for kept in names:
        row = "".join(f"{x:9.1e}" for x in plain.errors[kept])
        print(f"{'bfloat16: ' + kept:17}{row}")


table("nothing", "out")

# %%
times = {kept: plain.growth(kept) for kept in plain.errors}
print(f"from 2 to 32 blocks: nothing {times['nothing']:.1f} times, out {times['out']:.1f} times")
compare("10.out", nearest(times["out"], {1: "about 1", 4: "3 to 4", 16: "about 16"}))

# %% [markdown]
# With a float32 state the error stays at one rounding, whatever P is. With a rounded out it grows, but only 3.0 times.
#
# Why so slowly? Some roundings go up and some go down, so they partly cancel: their *squares* add up. Take the rounding
# after n of P blocks, in our unit:
#
# - **Size.** An out of n blocks is a mean of random values. It is √(P/n) times as large as the final out, and so is its
#   rounding.
# - **Weight.** It enters the final out with weight n/P.
# - **Both.** √(P/n) · n/P = √(n/P). The square is **n/P**.
#
# The state is rounded after blocks 2 to P. The P parts were rounded, too, each with n = 1 and square 1/P: they add 1. For
# many blocks the sum is about P/2, so the error is about **√(P/2)**.

# %% tags=["nbval-ignore-output"]
unit = plain.errors["nothing"][0]
print("blocks   sum of squares   rule      measured")
for P, measured in zip(plain.ranks, plain.errors["out"], strict=True):
    squares = 1 + sum(n / P for n in range(2, P + 1))
    print(f"{P:6} {squares:16.1f}   {unit * squares**0.5:.1e}   {measured:.1e}")

# %% [markdown]
# The rule fits within a few percent.
#
# ## 5 · Why a rounded lse costs more
#
# Lesson 02 found that rounding lse is worse than rounding out. Is that because its error grows faster?

# %% tags=["nbval-ignore-output"]
predict(
    "10.lse",
    "Every lse is rounded, of the parts and the state. Does that error grow faster than out's?",
    ["no, about as fast", "yes, at least twice as fast", "yes, at least 4 times as fast"],
)

# %% tags=["nbval-ignore-output"]
table("nothing", "out", "lse")

# %%
print(f"from 2 to 32 blocks: out {times['out']:.1f} times, lse {times['lse']:.1f} times")
faster = times["lse"] / times["out"]
words = ("no, about as fast", "yes, at least twice as fast", "yes, at least 4 times as fast")
compare("10.lse", words[(faster >= 2) + (faster >= 4)])
show(error_curves.figure([plain]), error_curves.describe([plain]))

# %% [markdown]
# **Both grow at nearly the same speed, but lse starts three times as high.** Why? Watch one row merge its last 13 of 32
# blocks:

# %%
whole = list(states(blocks(*inputs, 32)))[19:]
lses = list(states(blocks(*inputs, 32), lse=narrow))[19:]
outs = list(states(blocks(*inputs, 32), out=narrow))[19:]
sizes = torch.stack([x.out.abs() for x in whole]).amin(0)  # a number of out that is never small
row, column = divmod(int(sizes.argmax()), sizes.shape[1])
pair = [[x.lse[row].item() for x in each] for each in (whole, lses)]
other = [[x.out[row, column].item() for x in each] for each in (whole, outs)]
panels = [
    Steps("lse of one row", "blocks merged", "lse", *pair, first=20),
    Steps("one number of its out", "blocks merged", "out", *other, first=20),
]
show(rounding.steps(panels), rounding.describe_steps(panels))

# %% [markdown]
# On the left a step of lse is hardly wider than a gap, so rounding shifts it noticeably. Nothing corrects that: the state
# climbs beside the truth. On the right the lines are close together.
#
# An error of lse also does more harm. lse is an exponent, so its **absolute** error is a **relative** error of a whole
# weight. And its ulp grows with the number of keys:

# %%
for S in (1024, 2**20):
    lse = math.log(S) + 0.5  # scores of size 1: the mean of e^s is e^½
    ulp = torch.finfo(torch.bfloat16).eps * 2 ** math.floor(math.log2(lse))
    percent = 100 * math.expm1(ulp / 2)
    print(f"{S:9,} keys: lse {lse:4.1f}, ulp {ulp:.4f}, a weight is off by up to {percent:.1f} %")

# %% [markdown]
# ---
# **Halfway. This is a good place to stop.** You now know how wrong a right ring is. Its whole error is rounding. With a
# float32 state that is one rounding, whatever P is. With a rounded state it grows like √(P/2), and lse costs most.
#
# This is enough for stages 10.error and 10.fold of [exercise 10](../exercises/10_numerics.ipynb). If you return in a fresh
# kernel, run all cells up to here first.
#
# ---
#
# # Second half: finding what is too wrong
#
# ## 6 · What must be float32
#
# By section 4, a number that is rounded again and again must be float32. The backward carries such a number, too: dK of a
# block is a *courier* (lesson 09), and each of P ranks adds a term to it.


# %%
final_out, lse = (torch.from_numpy(x).float() for x in (true.out, true.lse))
delta = (dout * final_out).sum(-1)
block = get_block("blockwise", q)


def backward(rows):
    """What these query rows add to (dq, dk, dv)."""
    mine = dout[..., rows, :], q[..., rows, :]
    final = final_out[..., rows, :], lse[..., rows], delta[..., rows]
    return block.backward(BackwardRows(*mine, *final), k, v, causal=False, scale=64**-0.5)


# %% [markdown]
# We add up these terms in float32 or in bfloat16:


# %%
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
    "dK travels in bfloat16 among 32 ranks: its error is how many times that of one rounding?",
    ["about 1", "about √(P/2)", "about P"],
)

# %% tags=["nbval-ignore-output"]
for P in (2, 8, 32):
    in_bf16 = error(travelled(P, torch.bfloat16), true.dk)
    in_fp32 = error(travelled(P, torch.float32), true.dk)
    print(f"{P:2} ranks: error of dk in bf16 {in_bf16:.1e}   in fp32 {in_fp32:.0e}")

# %%
factor = in_bf16 / once
print(f"32 ranks: {factor:.1f} times one rounding; √(32/2) = {16**0.5:.1f}")
compare("10.courier", nearest(factor, {1: "about 1", 4: "about √(P/2)", 32: "about P"}))

# %% [markdown]
# It is the rule of section 4 again. So these numbers must be float32:
#
# | number | because |
# |---|---|
# | lse | it is used in an exponent |
# | out, and the sums inside a block | they would be rounded at every merge and every tile |
# | dK and dV on their way home | they would be rounded at every hop |
# | delta | the backward subtracts it from a number of its own size: the difference is small, a rounding is not |
#
# q, k, v and dO may be bfloat16: nothing is added to them. The final results are rounded once, so they may be, too.
#
# ## 7 · Choosing a tolerance
#
# A test must tell rounding from a fault. It lets errors pass up to a *bound*, the tolerance. Several packages use
# `allclose(x, truth, atol=1e-2)`: no number may be off by more than about 1e-2. We give it five results of a backward pass
# in float32, one right and four wrong. (The last has lost 16 of its 24 binary digits.)

# %%
right = tolerance.Results(eight, lse, *backward(slice(None)))
zeros = {name: 0 * getattr(right, name) for name in ("dq", "dk", "dv")}
gradients = {
    "right": right,
    "dk and dv swapped": right._replace(dk=right.dv, dv=right.dk),
    "dk halved": right._replace(dk=right.dk / 2),
    "zeros": right._replace(**zeros),
    "rounded to bf16": tolerance.Results(*(x.bfloat16().float() for x in right)),
}

# %% tags=["nbval-ignore-output"]
predict(
    "10.atol",
    "How many of the four wrong ones pass allclose(atol=1e-2) for dq, dk and dv?",
    unit="of 4",
)


# %%
def pairs(result):
    """(found, true) for dq, dk and dv."""
    return [(getattr(result, n), torch.from_numpy(getattr(true, n))) for n in ("dq", "dk", "dv")]


def passes(result, atol):
    """Whether dq, dk and dv all pass."""
    return all(torch.allclose(x.double(), t, atol=atol) for x, t in pairs(result))


for name, result in gradients.items():
    far = max(error(*pair) for pair in pairs(result))
    words = "below 1e-6" if far < 1e-6 else f"{far:.1g}"
    print(f"{name:18} passes atol 1e-2: {passes(result, 1e-2)}   relative error {words}")
compare("10.atol", sum(passes(result, 1e-2) for result in gradients.values()) - passes(right, 1e-2))

# %% [markdown]
# All pass. The loss is a mean over tokens, so the gradients are tiny, and *zero* is within 1e-2 of anything tiny. A bound
# must be relative to the truth: norm over norm, or largest error over largest entry. (Never entry by entry, because some
# entry is nearly zero and its rounding is not.)
#
# How large may it be? Do not guess. **Measure how wrong an honest program is:**
#
# 1. Take the plainest implementation, in the same dtype, on the same inputs.
# 2. Measure its error against the float64 oracle.
# 3. Allow twice that error, and at least a rounding: the plainest may be exactly right by luck.
#
# `ringlab.conformance.tolerance` does this, for largest over largest.

# %% tags=["nbval-ignore-output"]
bounds = tolerance.bounds(q, k, v, dout, true=true)
print("bounds:", ", ".join(f"{name} {bound:.0e}" for name, bound in bounds.items()))

# %%
for name, result in gradients.items():
    found = tolerance.errors(result, true)
    wrong = [n for n in tolerance.NAMES if not found[n] <= bounds[n]]
    print(f"{name:18} fails on: {', '.join(wrong) or 'nothing'}")

# %% [markdown]
# Every wrong one fails, and the right one passes. (The code asks `not found <= bound`, because `found > bound` is false for a
# NaN and would let it pass.)
#
# ## 8 · A curve shows what a bound misses
#
# A bound is not always enough. In bfloat16 the plainest implementation is itself far off, so the bound is wide, and a
# rounded out slips through:

# %%
plainest = torch.softmax(inputs[0] @ inputs[1].T / 64**0.5, -1) @ inputs[2]
exact = error_curves.truth(*inputs)
honest = error(plainest, exact)
print(f"plainest bf16: error {honest:.0e}, so {2 * honest:.0e} is allowed")
for P in (8, 32):
    found = error(list(states(blocks(*inputs, P), out=narrow))[-1].out, exact)
    print(f"running out in bf16, {P:2} blocks: error {found:.0e}, passes: {found <= 2 * honest}")

# %% [markdown]
# The curve of section 5 shows this fault, because it rises. **A bound sees a level; a curve sees a shape.** On plain scores:
#
# - Rising: something is rounded *between* the blocks. If the curve is several times above that of out, it is lse.
# - Falling: something is rounded *inside* the blocks, for example the *accumulator*, the running sum over keys. Shorter
#   blocks round it less often.
# - Flat, but too high: something is rounded *before* the blocks, for example q, after a factor was multiplied into it.
#
# Other inputs show other faults. *Large* scores have a q that is multiplied by a factor, the `gain`. A rounded q shows most
# there, because a larger score is off by more. *Sloped* scores rise along the keys, from −`slope` to `slope`.

# %% tags=["nbval-ignore-output"]
error_curves.play()

# %% [markdown]
# (Blue is sound, and yet it falls on large scores. There a part is nearly one of the values v, which is a bfloat16 number
# already.)
#
# Sloped scores show a fault that is no rounding: the maximum rises, and the program forgets to rescale what it has summed.

# %% tags=["nbval-ignore-output"]
predict(
    "10.rise",
    "It forgets to rescale. 4 blocks, plain scores: error 0.062. The error where scores rise is …",
    ["smaller", "about the same", "more than 10 times as large"],
)

# %%
forgets, at = error_curves.FAULTS["no rescale"], {}
for probe in ("plain", "sloped"):
    at[probe] = error_curves.errors(forgets, probe, (4,))[0]
    print(f"never rescaled, 4 blocks, {error_curves.TITLES[probe]}: error {at[probe]:.2g}")
names = {0.5: "smaller", 1: "about the same", 20: "more than 10 times as large"}
compare("10.rise", nearest(at["sloped"] / at["plain"], names))

# %% [markdown]
# Where scores rise, every block raises the maximum, and all earlier blocks keep far too much weight. **A test with one kind
# of input, or one P, finds only what that input shows.**
#
# ## Recap
#
# - A ring adds in another order than one device: other bits, the same accuracy.
# - One rounding to bfloat16 costs 1.7e-3, norm over norm. With a float32 state the error stays there. With a rounded state
#   it grows like √(P/2).
# - float32: lse, out, delta, dK and dV on their way. bfloat16: what is only multiplied, and the final result.
# - Tolerance: relative, twice the error of the plainest implementation in the same dtype. NaN fails.
# - A curve over P, on several inputs, shows where a fault is.
#
# ## Self-check
#
# Answer without scrolling up, then open.
#
# <details><summary>1. Your ring and SDPA differ in the last digits. How do you find out which is wrong?</summary>Compare
# both with a float64 oracle. If both are about equally far off, neither is.</details>
#
# <details><summary>2. The error is the same for 1 and for 32 blocks, but three times too high on large scores. Where do
# you look?</summary>Before the merges: at q, the scale, the scores.</details>
#
# <details><summary>3. Somebody keeps lse in bfloat16 "to save memory". What does that save, with D = 128, and what does
# it cost?</summary>Two bytes beside 4 · 128 of out, for each row; and every weight is off by up to a percent or
# more.</details>
#
# **Now you:** [exercise 10](../exercises/10_numerics.ipynb): an error, a fold, a tolerance, and eight programs to
# diagnose.
