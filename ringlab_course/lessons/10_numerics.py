# %% [markdown]
# # 10 · Numerics
#
# **Afterwards you can** say what must be float32 in ring attention and why, read an error curve, and choose a
# tolerance instead of guessing one.
#
# **You need first** [lesson 02](02_online_softmax.ipynb), the merge; [lesson 03](03_tiled_attention.ipynb), the backward;
# [lesson 05](05_emulated_ring.ipynb), the ring on virtual ranks; for section 7, [lesson 09](09_backward_ring.ipynb),
# delta and couriers.
#
# **Minutes** 60, in two halves.
#
# Some say that ring attention is "bit-for-bit identical to full attention". Others call it "an approximation". Both are
# wrong. This lesson asks one question: **how wrong may a right ring be?** The first half measures that error. The second half
# uses it to find bugs.

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
# The whole lesson follows from one fact, seen on paper. Take a computer that keeps three decimal digits.
# Add 100, 0.4 and 0.4:
#
# - from the left: 100 + 0.4 = 100.4, kept as 100; and again + 0.4: **100**;
# - small ones first: 0.4 + 0.4 = 0.8, and 100 + 0.8 = 100.8, kept as **101**.
#
# Two orders give two results. float32 keeps 24 binary digits. It counts up to
# 2²⁴ = 16,777,216 without a gap. Add 1 and 1 to that:

# %%
big, one = torch.tensor(2.0**24), torch.tensor(1.0)
print("from the left, above 2**24:   ", ((big + one) + one - big).item())
print("small ones first, above 2**24:", (big + (one + one) - big).item())

# %% [markdown]
# bfloat16 keeps only 8 binary digits, so the same happens at 2⁸ = 256. On the left we start at 250 and add 1 twelve times. On
# the right we start there again and add 2.6 twelve times. Each grey line is a number that bfloat16 has. After every addition the sum must choose the nearest line.


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
# A ring must round differently. One device adds up a row's keys from first to last. P ranks hold P blocks of keys, one each.
# Each block is added up by itself, and the results are merged.


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
# the norm of the truth. (`dout` is for section 7.)


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
for P, found in ((1, alone), (8, eight)):
    print(f"P = {P}: relative error {error(found, true.out):.0e}")

# %% [markdown]
# The ring is **not bit-for-bit identical** to one device, but both are equally close to the truth. Is it an approximation?
# Run the same ring in float64.

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
# float64 has 29 more binary digits than float32, and each of them is a digit more in the result. So the ring is **not an
# approximation either**: its whole error is rounding.
#
# Rounding is not random. The same operations in the same order give the same bits:

# %%
rolled = q, k.roll(64, dims=2), v.roll(64, dims=2)  # 64 keys are a block: the next rank has it now
print("the same ring again, same bits:", torch.equal(run_ring((q, k, v), 8), eight))
print("the same blocks in another order, same bits:", torch.equal(run_ring(rolled, 8), eight))

# %% [markdown]
# ringlab fixes the order. A program that merges blocks as they arrive may give other bits every run.
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
# Two words measure the grey lines of section 1. The gap between them grows with the numbers; just above 1 it is called
# **eps**. Rounding is off by at most half a gap. Relative to the number, that is at most eps / 2, the *unit roundoff*.

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
# is less than half of that: **1.7e-3** here. From now on the rounding of the final out is our unit: *one rounding*.
#
# ## 4 · Many roundings: the error against P
#
# A ring that keeps its running out or lse in bfloat16 rounds it again at every merge. Lesson 02 saw the error grow. By
# which law?
#
# We need no ranks for that, only their P blocks of keys. A block gives a *part*: an out and an lse. A kernel returns out in
# the dtype of q, so the part's out is bfloat16. Its lse is float32.


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
# The *state* is the running out and lse. It is merged with one part after the other, and it has a dtype of its own. (Where
# we keep lse in bfloat16, we round the lse of each part, too.)


# %%
def states(parts, out=torch.float32, lse=torch.float32):
    """The state after each part, if its out and its lse are kept in these dtypes."""
    state = None
    for part_out, part_lse in parts:
        part = Partial(part_out.float(), part_lse.to(lse).float())
        state = merge(state, part) if state else part
        state = Partial(state.out.to(out).float(), state.lse.to(lse).float())
        yield state


# %% [markdown]
# Now round the running out to bfloat16 after every merge. Inputs are 64 random queries and 1,024 random keys. Their scores
# are of size 1: we call them *plain*. The course's `error_curves` runs this program on three such inputs and takes the mean.
# The program with a float32 state is the *sound* one.

# %%
plain = error_curves.panel("plain")
LABELS = {"nothing": "state in fp32 (blocks bf16)", "out": "out in bf16", "lse": "lse in bf16"}


def table(*names):
    print(f"{'blocks':27}" + "".join(f"{P:9}" for P in plain.ranks))
    for kept in names:
        row = "".join(f"{x:9.1e}" for x in plain.errors[kept])
        print(f"{LABELS[kept]:27}{row}")


# %% tags=["nbval-ignore-output"]
table("nothing", "out")

# %% [markdown]
# With a float32 state the error stays at one rounding, whatever P is. With a rounded out it grows, but slowly. Some roundings
# go up, some down, so they partly cancel: their *squares* add up.
#
# First 2 blocks, on paper, in our unit.
#
# - **The two parts.** An out on plain scores is nearly a mean of random values. A mean of half as many values is √2 times as
#   large, so its rounding is √2 units. The merge takes half of it: √2/2, whose square is ½. Two parts make **1**.
# - **The state** is rounded once more after the merge: **1**.
# - **Both** make 2, so the error is √2 = **1.4** roundings.
#
# Now P blocks. The parts make 1 again. The state is rounded after blocks 2, 3, … P. After block n, out is √(P/n) times
# its final size: squared rounding P/n. Later merges multiply it by (n/P)². Together: **n/P**.

# %% tags=["nbval-ignore-output"]
predict(
    "10.out",
    "Add up these squares for 128 blocks. How many roundings is the error of a rounded out?",
    ["about 4", "about 8", "about 64", "about 128"],
)

# %%
unit, program = plain.errors["nothing"][0], error_curves.FAULTS["bf16 out"]
runs = [error_curves.errors(program, "plain", (2, 8, 32, 128), seed=seed) for seed in (0, 1, 2)]
print("blocks   sum of squares   its root   measured, in roundings")
for P, measured in zip((2, 8, 32, 128), torch.tensor(runs).mean(0) / unit, strict=True):
    squares = 1 + sum(n / P for n in range(2, P + 1))
    print(f"{P:6} {squares:16.1f} {squares**0.5:10.1f} {measured.item():10.1f}")
names = {4: "about 4", 8: "about 8", 64: "about 64", 128: "about 128"}
compare("10.out", nearest(measured.item(), names))

# %% [markdown]
# For many blocks the sum is nearly P/2, so the error is about **√(P/2)** roundings.
#
# ## 5 · Why a rounded lse costs more
#
# Now round every lse instead, those of the parts and that of the state. Begin with 2 blocks. A rounded out gave 2.3e-3.

# %% tags=["nbval-ignore-output"]
predict(
    "10.lse",
    "2 blocks, every lse in bfloat16. Against a rounded out, the error is …",
    ["smaller, about a third", "about the same", "larger, about 3 times"],
)

# %% tags=["nbval-ignore-output"]
table("out", "lse")

# %%
first = plain.ranks.index(2)
ratio = plain.errors["lse"][first] / plain.errors["out"][first]
names = {1 / 3: "smaller, about a third", 1: "about the same", 3: "larger, about 3 times"}
compare("10.lse", nearest(ratio, names))
show(error_curves.figure([plain]), error_curves.describe([plain]))

# %% [markdown]
# Why 3 times, at 2 blocks? Follow a rounding from lse to out:
#
# 1. **One lse.** The lse of 512 keys lies between 4 and 8. There bfloat16's gap is 0.031, and a rounding is off by gap/√12 on
#    average (as a root mean square): 0.009.
# 2. **The difference of two** is off by √2 times as much: 0.013.
# 3. **A weight** is a sigmoid of this difference. Where both weights are about ½, its slope is ¼: 0.0032.
# 4. **The out** lies between out₁ and out₂ and moves by that share of out₁ − out₂. Each is √2 times the final out, so
#    their difference is twice it: out is off by 0.0064.

# %%
gap = torch.finfo(torch.bfloat16).eps * 4
weight_off = gap / 12**0.5 * 2**0.5 / 4
print(f"predicted, with the rounding of the parts' outs: {math.hypot(2 * weight_off, unit):.1e}")
print(f"measured: {plain.errors['lse'][first]:.1e}")

# %% [markdown]
# In one sentence: lse is an exponent, so if a block's lse is off by 0.01, its e^lse is off by 1 %.
#
# ## 6 · Too many blocks
#
# The n-th block raises lse by only about 1/n. But the gap stays at 0.031. Watch the lse of one row while the last blocks of
# 128 are merged:

# %%
inputs = [x.bfloat16() for x in error_curves.inputs("plain", 0)]
exact = error_curves.truth(*inputs)
kept = [list(states(blocks(*inputs, 128), lse=dtype)) for dtype in (torch.float32, torch.bfloat16)]
path = [[state.lse[0].item() for state in each[99:]] for each in kept]
panel = Steps("A bfloat16 lse stops rising (128 blocks)", "blocks merged", "lse", *path, first=100)
show(rounding.steps([panel]), rounding.describe_steps([panel]))

# %%
counts = 32, 64, 128, 256
off = [error_curves.mean_errors(f"bf16 {kept}", "plain", counts) for kept in ("out", "lse")]
for P, out_off, lse_off in zip(counts, *off, strict=True):
    errors = f"error with out rounded {out_off:4.1%}, with lse rounded {lse_off:5.1%}"
    print(f"{P:3} blocks: last step {1 / P / gap:.2f} gaps   {errors}")

# %% [markdown]
# At 64 blocks the last steps are half a gap, and with more blocks they are less. So most of them leave lse where it is,
# as 256 + 1 did, and later blocks weigh too much. At 128 blocks the error jumps.
#
# ---
# **Halfway. This is a good place to stop.** The whole error of a right ring is rounding. If the state is float32 and the
# parts' outs are bfloat16, the error is one rounding, whatever P is (and a second one if the
# result is returned in bfloat16). On plain scores and many blocks, a rounded out costs about
# √(P/2) roundings. On 1,024 keys and up to 32 blocks, a rounded lse costs about three times as much as a rounded out.
#
# It is enough for stages 10.error and 10.fold of [exercise 10](../exercises/10_numerics.ipynb). If you return in a fresh
# kernel, run all cells up to here first.
#
# ---
#
# # Second half: finding what is too wrong
#
# ## 7 · What must be float32
#
# The backward gets two numbers for each row: lse and delta. It computes weights as exp(score − lse), and dS as
# weight · (dP − delta). Either could be kept in bfloat16. We round one of them at a time, once:


# %%
final_out, lse = (torch.from_numpy(x).float() for x in (true.out, true.lse))
numbers = {"lse": lse, "delta": (dout * final_out).sum(-1), "dout": dout, "q": q, "k": k, "v": v}
block = get_block("blockwise", q)


def backward(**changed):
    """(dq, dk, dv), if some of its numbers are changed."""
    x = numbers | changed
    rows = BackwardRows(x["dout"], x["q"], final_out, x["lse"], x["delta"])
    return block.backward(rows, x["k"], x["v"], causal=False, scale=64**-0.5)


# %% tags=["nbval-ignore-output"]
predict(
    "10.backward",
    "lse is rounded to bfloat16, or delta. Which does more harm to the gradients?",
    ["lse, more than 10 times", "both about the same", "delta, more than 10 times"],
)

# %%
harm, right = {}, (true.dq, true.dk, true.dv)
for name, number in numbers.items():
    found = backward(**{name: number.bfloat16().float()})
    harm[name] = max(map(error, found, right)) / once
    print(f"{name:6} in bf16: dq, dk and dv are off by at most {harm[name]:.1f} roundings")
sizes = numbers["delta"].square().mean().sqrt(), (dout @ v.mT).square().mean().sqrt()
print("delta is of size {:.4f}, dP of size {:.4f}".format(*sizes))
names = {20: "lse, more than 10 times", 1: "both about the same", 0.05: "delta, more than 10 times"}
compare("10.backward", nearest(harm["lse"] / harm["delta"], names))

# %% [markdown]
# An lse in bfloat16 costs five roundings, a delta less than one. On plain scores delta is much smaller than dP, so its
# rounding hardly counts. (We keep delta in float32 all the same: it is one number per row.) q, k, v and dO may be bfloat16:
# rounded once, each costs one or two roundings. So may the final results. But these must be float32:
#
# | number | because | measured in |
# |---|---|---|
# | lse | it is used in an exponent | sections 5 to 7 |
# | the running out | it would be rounded at every merge | section 4 |
# | the sums inside a block | they would be rounded at every tile | section 9 |
# | dK and dV on their way home | they would be rounded at every hop | lesson 09 |
#
# ## 8 · Choosing a tolerance
#
# A test must tell rounding from a fault. It lets errors pass up to a *bound*, the tolerance. A widely used package
# ([errata](../docs/errata.md)) has `allclose(x, truth, atol=1e-2)`: no number may be off by more than about 1e-2. We give it
# five results of a backward pass that promises float32, one right and four wrong. (The last was rounded to bfloat16.)

# %%
right = tolerance.Results(eight, lse, *backward())
zeros = {name: 0 * getattr(right, name) for name in ("dq", "dk", "dv")}
gradients = {
    "right": right,
    "dk and dv swapped": right._replace(dk=right.dv, dv=right.dk),
    "dk halved": right._replace(dk=right.dk / 2),
    "zeros": right._replace(**zeros),
    "rounded to bf16": tolerance.Results(*(x.bfloat16().float() for x in right)),
}

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

# %% [markdown]
# All four wrong ones pass. The loss is a mean over tokens, so the gradients are tiny, and *zero* is within 1e-2 of anything tiny. A bound
# must be relative to the truth: norm over norm, or largest error over largest entry. Do not divide each error by its own
# entry: an entry near zero has an ordinary error, which is large beside it.
#
# How large may it be? **Measure how wrong an honest program is:**
#
# 1. Take the plainest implementation, in the same dtype, on the same inputs.
# 2. Measure its error against the float64 oracle.
# 3. Allow twice that error plus about one eps of the dtype, because a measured error may be zero by luck.
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
# Only the wrong ones fail. (The code asks `not found <= bound`, because `found > bound` is false for a NaN.)
#
# ## 9 · A curve shows what a bound misses
#
# In bfloat16 the plainest implementation is itself far off, so the bound is wide. Does it catch a rounded out?

# %%
plainest = torch.softmax(inputs[0] @ inputs[1].T / 64**0.5, -1) @ inputs[2]
honest = error(plainest, exact)
print(f"plainest bf16: error {honest:.0e}, so at least {2 * honest:.0e} is allowed")
for P in (8, 32):
    found = error(list(states(blocks(*inputs, P), out=torch.bfloat16))[-1].out, exact)
    print(f"running out in bf16, {P:2} blocks: error {found:.0e}, passes: {found <= 2 * honest}")

# %% [markdown]
# It does not. The curve of section 4 shows the fault: it rises. **A bound sees a level; a curve sees a shape.**
#
# Here are two other faulty programs. Their states are float32:
#
# - *bf16 accumulator*: after every tile of 32 keys, `acc = bf16(acc + weights @ values)`; the sum of the weights likewise.
# - *bf16 q*: kernels compute 2ˣ, not eˣ. So the program computes `bf16(q * scale * log2_e) @ k.T`. (q itself may be bfloat16;
#   this is a second rounding.)
#
# [error_curves.py](../ringlab_course/figures/error_curves.py) has all of their code.

# %% tags=["nbval-ignore-output"]
predict(
    "10.shape",
    "1,024 keys, an accumulator in bfloat16. From 1 block to 32, the error …",
    ["rises", "stays", "falls"],
)

# %%
one, many = error_curves.mean_errors("bf16 accumulator", "plain", (1, 32))
compare("10.shape", nearest(many / one, {4: "rises", 1: "stays", 0.25: "falls"}))
names = ("bf16 out", "bf16 accumulator", "bf16 q", "sound")
drawn = "plain", names, "Rises, falls, flat: three faults, three shapes"
show(error_curves.shapes(*drawn), error_curves.describe_shapes(*drawn))

# %% [markdown]
# It falls: a block of 1,024 keys rounds its sum 32 times, a block of 32 keys once. The curve of bf16 q is
# flat: its rounding happens before any block, so P does not matter.
#
# ## 10 · Four questions
#
# So a curve on plain scores says where to look. Take the error at the largest P, and divide it by a *yardstick*: √(P/2) times
# the error in 1 block, about what a rounded out reaches. With 1,024 keys and P up to 32, ask in turn:
#
# 1. **Is it over ten times the yardstick?** For these sizes, rounding alone never gets so far. A step is missing: *no rescale*, for example,
#    forgets `acc = acc * exp(old_max - new_max)`.
# 2. **Does the curve rise?** Something is rounded *between* the blocks: out if it ends near one yardstick, lse if it
#    ends near three to five.
# 3. **Does it fall?** Something is rounded *inside* the blocks.
# 4. **Is it flat, but too high?** Something is rounded *before* the blocks.

# %% tags=["nbval-ignore-output"]
for name in ("no rescale", "bf16 lse", "bf16 out"):
    start, end = error_curves.mean_errors(name, "plain", (1, 32))
    yardstick = (32 / 2) ** 0.5 * start
    print(f"{name:10} at 32 blocks {end:5.1%}, {end / yardstick:4.1f} times its yardstick")

# %% [markdown]
# The fourth question is the hardest: on plain scores the curve of bf16 q is only a little above a sound one. Ask it on *large*
# scores: q times 8. (Exercise 10 calls this factor `gain`.) The rounding of q
# shifts a larger score further, and exp turns that shift into a relative error of its weight.

# %%
names = ("bf16 q", "sound")
drawn = "large", names, "bf16 q stands out, and the sound curve falls"
show(error_curves.shapes(*drawn), error_curves.describe_shapes(*drawn))
for probe in ("plain", "large"):
    bad, good = (error_curves.mean_errors(name, probe, (1,))[0] for name in names)
    print(f"{probe} scores, 1 block: bf16 q is {bad / good:.1f} times as far off as sound")

# %% [markdown]
# On large scores the sound curve is not flat: it falls. In a small block one key has nearly all the weight. The block's out is
# then nearly the value of that key, which is bfloat16 already, so there is little to round. Judge the shape on plain
# scores, and the level on large ones.
#
# ## 11 · One kind of input is not enough
#
# One fault shows *nothing* on plain scores. The program computes `exp(scores).half()`: it subtracts no maximum, and keeps
# the result in float16. A third input is *sloped*: scores rise along the keys, from −10 to 10, and random numbers of size 1
# come on top.

# %%
limit = math.log(torch.finfo(torch.float16).max)
print(f"float16 overflows if a score is above {limit:.1f}")
for probe in error_curves.PROBES:
    sample_q, sample_k, _ = error_curves.inputs(probe, 0)
    largest = (sample_q @ sample_k.T / 8).max().item()
    bad, good = (max(error_curves.mean_errors(n, probe)) for n in ("fp16 overflow", "sound"))
    print(f"{probe:7} largest score {largest:4.1f}   worst error {bad:.1e}   sound {good:.1e}")

# %% [markdown]
# On plain scores, nothing finds the fault. Large and sloped ones do. **A test with one kind of input finds only what
# that input shows.**
#
# ## Recap
#
# - A ring adds in another order: other bits, the same accuracy.
# - One rounding to bfloat16 costs 1.7e-3, norm over norm. With a float32 state the error stays there. On plain scores,
#   a rounded out costs about √(P/2) roundings. A rounded lse costs three times as much on 1,024 keys, up to 32 blocks.
# - float32: lse, the running out, sums inside a block, dK and dV on their way. bfloat16: q, k, v, dO, the
#   parts' outs, the final results.
# - Tolerance: relative, twice the error of the plainest implementation in the same dtype. NaN fails.
# - A curve over P, on several inputs, shows where a fault is.
#
# ## Self-check
#
# Answer without scrolling up, then open.
#
# <details><summary>1. Your ring and PyTorch's <code>scaled_dot_product_attention</code> differ in the last digits. Which is
# wrong?</summary>Compare both with a float64 oracle. If both are about equally far off, neither is.</details>
#
# <details><summary>2. The error is the same for 1 and for 32 blocks, but three times too high on large scores. Where do
# you look?</summary>Before the blocks: at q, the scale, the scores.</details>
#
# <details><summary>3. Somebody keeps lse in bfloat16 "to save memory". What does that save, with D = 128, and what does
# it cost?</summary>Two bytes beside 4 · 128 of out, for each row; and every weight is off by up to half a gap of
# lse: 1.6 % between 4 and 8, and 3 % above 8.</details>
#
# **Now you:** [exercise 10](../exercises/10_numerics.ipynb): an error, a fold, a tolerance, and eight programs to
# diagnose.
