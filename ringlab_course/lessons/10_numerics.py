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
# Some say that ring attention is "bit-for-bit identical to full attention". Others call it "an approximation". Both claims
# can be settled by measuring. On the way you learn how wrong a *right* program may be, and how to find the one number in it
# that was rounded too early.

# %%
import math

import torch

from ringlab import VirtualCluster, contiguous, launch, ring_attention
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
# # First half: rounding
#
# ## 1 · Three numbers on paper
#
# Take a computer that keeps three decimal digits. Add 100, 0.4 and 0.4:
#
# - from the left: 100 + 0.4 = 100.4, kept as 100; and again + 0.4: **100**;
# - small ones first: 0.4 + 0.4 = 0.8, and 100 + 0.8 = 100.8, kept as **101**.
#
# Every step was rounded as well as three digits allow, yet two orders give two results. Addition on a computer is
# commutative but not *associative*. float32 keeps 24 binary digits, so it can count up to 2²⁴ = 16,777,216 without a
# gap.

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
# bfloat16 keeps only 8 binary digits, so the same happens at 2⁸ = 256. From 250 we add 1 again and again; then 2.6, again
# from 250. A grey line is a number that bfloat16 has. Between two lines there is nothing: after every addition the sum
# must choose the nearer line.

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
# Above 256 the lines are 2 apart. 256 + 1 is halfway between two lines. Ties go to the number whose last stored bit is
# 0, and that is 256: the sum never leaves it. Adding 2.6 moves the sum, but from 256 on by 2 each time: every addition
# loses 0.6.
#
# ## 2 · The ring is another order
#
# One device adds up a row's keys in one order. Eight ranks add up each block by itself and merge the results, and each
# rank starts with its own block. By lesson 02, the bits need not agree.


# %%
def run_ring(qkv, P, block="blockwise"):
    """Attention on P virtual ranks, in the order of the sequence."""
    layout = contiguous(qkv[0].shape[2], P)

    def program(ring):
        shards = layout.shard(qkv, ring.rank)
        return ring_attention(*shards, ring=ring, layout=layout, causal=False, block=block)

    return layout.unshard(VirtualCluster(P).run(program).results)


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
# Both are about equally far from the float64 truth. So the ring is **not bit-for-bit identical**. Is it an approximation?
# Run the whole ring, with its messages and its other order, in float64, which has 29 more binary digits than float32.

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
# messages and order add no error of their own, and its whole error is rounding. Lesson 02 found the same for cutting keys
# into blocks.
#
# ## 3 · How much is one rounding?
#
# The number 100.4, as three formats keep it:

# %%
show(rounding.bits(100.4), rounding.describe_bits(100.4))

# %% [markdown]
# bfloat16 has the 8 exponent bits of float32, so the same range, but only 8 significant bits (7 in the fraction, and a
# leading 1 that is not stored). float16 has 11 significant bits, and pays for them with range.
#
# The gap between neighbouring numbers near x is one *ulp*, a unit in the last place. Just above 1 it is called **eps**.
# Rounding to the nearest number is off by at most half a gap. Relative to the number, that is at most eps / 2, the *unit
# roundoff*.

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
print("one rounding to bfloat16, measured in three ways:")
print(f"  worst single number, error over the number: {(gap / exact.abs()).max().item():.1e}")
print(f"  largest error over largest number:          {(gap.max() / exact.abs().max()).item():.1e}")
print(f"  norm of the error over norm of the truth:   {once:.1e}")

# %% [markdown]
# The three differ, so say which one you mean. The worst single number reaches the unit roundoff, **3.9e-3**. Most
# numbers are nearer to their line, so norm over norm is less than half of that: **1.7e-3**. Largest over largest, which
# the package's own tests use, is in between: **2.1e-3** here. This lesson measures norm over norm, and 1.7e-3 is its
# yardstick: *one rounding*.
#
# ## 4 · How fast does the error grow, and why?
#
# Lesson 02 found that out and lse must not be rounded between merges, and that rounding lse is worse. Now we measure it
# systematically. The inputs are bfloat16; each of P blocks returns its *part* of out in bfloat16, as a fast kernel may. The
# *state*, the running out and lse that are carried from block to block, has a dtype of its own:


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


def states(parts, out=torch.float32, lse=torch.float32):
    """The state after each part, if out and every lse are kept in these dtypes."""
    state = None
    for part_out, part_lse in parts:
        part = Partial(part_out.float(), part_lse.to(lse).float())
        state = merge(state, part) if state else part
        state = Partial(state.out.to(out).float(), state.lse.to(lse).float())
        yield state


# %% [markdown]
# The course's module `error_curves` holds the same program, in one variant for each fault, and its errors are means over
# three inputs. We check it against ours once:

# %%
narrow = torch.bfloat16
inputs = [x.to(narrow) for x in error_curves.inputs("plain", 0)]  # 64 queries, 1,024 keys
same = error_curves.run(error_curves.FAULTS["bf16 lse"], *inputs, 8)
mine = list(states(blocks(*inputs, 8), lse=narrow))[-1].out
print("error_curves computes the same bits:", torch.equal(mine, same))

# %% [markdown]
# More blocks mean more merges, and more roundings of the state.

# %% tags=["nbval-ignore-output"]
predict(
    "10.out",
    "The running out is rounded to bfloat16: from 2 to 32 blocks, the error grows by a factor of",
    ["about 1", "3 to 4", "about 16"],
)
predict(
    "10.lse",
    "Rounding every lse, of the parts and the state, is worse. Does that error grow faster, too?",
    ["no, about as fast", "yes, at least twice as fast", "yes, at least 4 times as fast"],
)

# %% tags=["nbval-ignore-output"]
plain = error_curves.panel("plain")
print("blocks           " + "".join(f"{P:9}" for P in plain.ranks))
for kept in ("nothing", "out", "lse"):
    row = "".join(f"{x:9.1e}" for x in plain.errors[kept])
    print(f"{'bfloat16: ' + kept:17}{row}")

# %%
times = {kept: plain.growth(kept) for kept in plain.errors}
print("from 2 to 32 blocks:", ", ".join(f"{kept} {x:.1f} times" for kept, x in times.items()))
compare("10.out", nearest(times["out"], {1: "about 1", 4: "3 to 4", 16: "about 16"}))
faster = times["lse"] / times["out"]
words = ("no, about as fast", "yes, at least twice as fast", "yes, at least 4 times as fast")
compare("10.lse", words[(faster >= 2) + (faster >= 4)])
print("with 2 blocks: ", ", ".join(f"{kept} {x[1]:.0e}" for kept, x in plain.errors.items()))
print("with 32 blocks:", ", ".join(f"{kept} {x[-1]:.0e}" for kept, x in plain.errors.items()))

# %% [markdown]
# **Both errors grow at nearly the same speed, for many blocks like √(P/2).** lse starts three times as high, at 2 blocks.
# (Lesson 02's larger factor came from one input.)
#
# Why? The roundings are independent, so their *squares* add up. Let the unit be one rounding of the final out. The out of n
# blocks is a mean of random values, so it is √(P/n) times as large as the final out, and so is its rounding. But it enters
# the final out with weight n/P:
#
# | what is rounded | size, in the unit | weight | product, squared |
# |---|---|---|---|
# | each of P parts (n = 1) | √P | 1/P | 1/P, and 1 for all P |
# | the state after n = 2 … P blocks | √(P/n) | n/P | n/P |
#
# Together P/2 + 1½ − 1/P. With a float32 state only the parts' 1 is left: the first row above is flat. And lse? An error δ
# in it after n blocks shifts weight between n and P − n blocks, and moves out by δ·√(n(P − n))/P of its size. The squares
# sum to about δ²·P/6: √P again. Does out's rule fit?

# %% tags=["nbval-ignore-output"]
unit = plain.errors["nothing"][0]
print("blocks   sum of squares   rule      measured")
for P, measured in zip(plain.ranks, plain.errors["out"], strict=True):
    squares = 1 + sum(n / P for n in range(2, P + 1))
    print(f"{P:6} {squares:16.1f}   {unit * squares**0.5:.1e}   {measured:.1e}")

# %% [markdown]
# Within a few percent: from 2 to 32 blocks the sum's root grows 3.0 times.
#
# Why does a rounded *lse* do so much worse? Watch one row merge its last 13 of 32 blocks:

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
# The running lse climbs by about 1/n at block n. After 20 blocks a step is 1 to 1½ gaps, and rounding shifts it by up to
# half a gap. Nothing ever corrects it: the state climbs beside the truth, here about one gap too high, in other rows too
# low. The gaps of out are narrow beside its steps, so its errors are small.
#
# An error of lse is also worth more. By lesson 02, lse is an exponent, so its **absolute** error is a **relative**
# error of a whole weight. And lse grows with the number of keys, and its ulp with it.

# %%
for S in (1024, 2**20):
    lse = math.log(S) + 0.5  # scores of size 1: the mean of e^s is e^½
    ulp = torch.finfo(torch.bfloat16).eps * 2 ** math.floor(math.log2(lse))
    percent = 100 * math.expm1(ulp / 2)
    print(f"{S:9,} keys: lse {lse:4.1f}, ulp {ulp:.4f}, a weight is off by up to {percent:.1f} %")

# %% [markdown]
# For out, the same rounding is at most 0.4 % of each number. The table above as curves:

# %%
show(error_curves.figure([plain]), error_curves.describe([plain]))

# %% [markdown]
# To read such a curve, look first at its *shape* on plain scores. Flat: no *rounding* in the merges. Rising from P = 2 on:
# there is one. Falling: it is inside the blocks, for example an accumulator that is rounded every few keys, because shorter
# blocks round it less often. Then look at its *level*: lse is several times above out.
#
# Other inputs show other things. Make q eight times as large (exercise 10 calls this factor `gain`): then a few keys hold
# nearly all the weight.

# %% tags=["nbval-ignore-output"]
predict(
    "10.large",
    "Scores of size 8, more and more blocks: the error with a float32 state (blue) …",
    ["rises", "stays", "falls"],
)

# %%
large = error_curves.panel("large")
names = {2: "rises", 1: "stays", 0.5: "falls"}
compare("10.large", nearest(large.errors["nothing"][-1] / large.errors["nothing"][0], names))
show(error_curves.figure([large]), error_curves.describe([large]))

# %% [markdown]
# Where one key has nearly all of a block's weight, the block's out is that key's v, and rounding a bfloat16 number to
# bfloat16 costs nothing; the shorter the blocks, the more often this happens. Now let the scores rise steadily along the
# keys, by 20 in all. Then the last of 4 blocks has 99 % of the weight.

# %% tags=["nbval-ignore-output"]
predict(
    "10.rise",
    "Scores that rise along the keys, 4 blocks: a rounded lse makes the error …",
    ["several times as large, as before", "no larger"],
)

# %%
rise = error_curves.panel("sloped")
names = {5: "several times as large, as before", 1: "no larger"}
at = rise.ranks.index(4)
last = torch.linspace(-10, 10, 1024).softmax(0)[768:].sum().item()
times = {kept: x[at] / rise.errors["nothing"][at] for kept, x in rise.errors.items()}
print(f"the last of 4 blocks has {last:.1%} of the weight; rounding out: {times['out']:.1f} times")
compare("10.rise", nearest(times["lse"], names))
show(error_curves.figure([rise]), error_curves.describe([rise]))

# %% [markdown]
# Up to four blocks, the last one holds nearly all the weight, and an error in the small weight of the others hardly counts.
# But from 4 blocks on, the small weight of the earlier blocks is enough to move *out* off a bfloat16 number, so it is
# rounded once more: 1.4 times the error.
#
# A fault that is no rounding: an accumulator that is not rescaled when the maximum rises.

# %%
for probe in ("plain", "sloped"):
    found = error_curves.errors(error_curves.FAULTS["no rescale"], probe, (4,))[0]
    print(f"never rescaled, 4 blocks, {error_curves.TITLES[probe]}: error {found:.2g}")

# %% [markdown]
# Where scores rise, every block raises the maximum, so all earlier blocks keep far too much weight. **A test with one kind
# of input, or one P, finds only what that input shows.**
#
# In a live notebook, choose inputs and dtype yourself:

# %% tags=["nbval-ignore-output"]
error_curves.play()

# %% [markdown]
# ## Halfway: a good place to stop
#
# This is enough for stages 10.error and 10.fold of [exercise 10](../exercises/10_numerics.ipynb). When you come back, run
# the first half's cells again.
#
# # Second half: the ring
#
# ## 5 · The same bits, every time
#
# The same operations in the same order give the same bits. So the order must be *fixed*, and in ringlab it is: each rank
# starts with its own block and goes around the ring.

# %%
half = contiguous(512, 2)


def two_ranks(ring):
    shards = half.shard((q, k, v), ring.rank)
    return ring_attention(*shards, ring=ring, layout=half, causal=True)


virtual, real = VirtualCluster(2).run(two_ranks), launch(two_ranks, 2)
print("twice on virtual ranks, same bits:", torch.equal(run_ring((q, k, v), 8), eight))
same = all(map(torch.equal, virtual.results, real.results))
print("virtual ranks and processes over gloo, PyTorch's CPU transport:", same)
parts = list(blocks(*inputs, 8))
arrived = [5, 2, 7, 0, 6, 1, 4, 3]
one, other = (list(states(each))[-1] for each in (parts, [parts[i] for i in arrived]))
print("merged as blocks happen to arrive, same bits:", torch.equal(one.out, other.out))

# %% [markdown]
# Check a change that should not alter results with `torch.equal`. Equal bits hold for one order, on one kind of machine.
# Across machines, and against one device, ask for *close*, and say how close.
#
# ## 6 · What must be float32
#
# The backward carries something, too: the couriers of lesson 09, dK and dV of a block, collect a term on every rank, P
# hops long. We add the terms up on the way, in float32 or in bfloat16:


# %%
final_out, lse = (torch.from_numpy(x).float() for x in (true.out, true.lse))
delta = (dout * final_out).sum(-1)
block = get_block("blockwise", q)


def backward(rows):
    """What these query rows add to (dq, dk, dv)."""
    mine = dout[..., rows, :], q[..., rows, :]
    final = final_out[..., rows, :], lse[..., rows], delta[..., rows]
    return block.backward(BackwardRows(*mine, *final), k, v, causal=False, scale=64**-0.5)


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
# It is the second row of section 4's table: after hop n the sum has about √(n/P) of its final size. The squares of all hops
# make about P/2, so the error is √(P/2) roundings.
#
# What about delta? It is subtracted: with the softmax weights W and dW = dO Vᵀ, dS = W ∘ (dW − delta). Where dW and
# delta are nearly equal, the difference is small, but the rounding of delta is not. Add 4 to every value: dW and
# delta grow, and their difference stays.

# %%
shifted = v + 4
near = tolerance.truth(q, k, shifted, dout)
near_out, near_lse = (torch.from_numpy(x).float() for x in (near.out, near.lse))
near_delta = (dout * near_out).sum(-1)
for name, used in (("float32", near_delta), ("bfloat16", near_delta.bfloat16().float())):
    rows = BackwardRows(dout, q, near_out, near_lse, used)
    dq = block.backward(rows, k, shifted, causal=False, scale=64**-0.5)[0]
    off = error(dq, near.dq)
    print(f"delta in {name:8}: error of dq {'below 1e-5' if off < 1e-5 else f'{off:.0e}'}")

# %% [markdown]
# | quantity | float32 because |
# |---|---|
# | lse | it is used in an exponent: an absolute error is a relative error of a weight |
# | out, or its accumulator and the sum `total` | it is rounded at every merge or tile, and the error grows like √ of their number |
# | delta | it is subtracted from something of its own size |
# | dK, dV on their way home | one rounding per hop, P hops |
#
# These may be bfloat16: q, k, v and dO, which are multiplied but never accumulated into, and the final results, rounded
# once.
#
# ## 7 · Range, and one more trap
#
# float16 is eight times as exact as bfloat16. So why do models train in bfloat16?

# %%
for dtype in (torch.float16, torch.bfloat16):
    x = torch.tensor([300.0, 12.0, 256.0], dtype=dtype)
    square, power, count = x[0] ** 2, x[1].exp(), x[2] + 1
    name = str(dtype).removeprefix("torch.")
    print(f"{name:8}   300² = {square:7.0f}   e^12 = {power:7.0f}   256 + 1 = {count:.0f}")

# %% [markdown]
# float16 ends at 65,504. A score before scaling can reach that, and so can an exponential from which no maximum was
# subtracted. bfloat16 overflows only near 3·10³⁸, but it cannot count to 257. **Overflow is loud, lost digits are
# silent.**
#
# Lesson 02's traps are in the merge. This one is before it: fast kernels compute $2^x$ instead of $e^x$, and multiply scale
# · log₂e into q beforehand. That costs nothing in float32. But what if the product is rounded back to bfloat16? (The code
# leaves the scale, 1/8, out of this product: a power of two rounds nothing.)


# %%
Q, keys, V = (x.to(narrow) for x in error_curves.inputs("large", 0, gain=12.0))  # scores of size 12
truth, log2e = error_curves.truth(Q, keys, V), 1 / math.log(2)
folded = {}
for name, product in (("float32", Q.float() * log2e), ("bfloat16", (Q.float() * log2e).bfloat16())):
    folded[name] = product.float() * math.log(2)  # blocks() computes e^x, so take log₂e out again
    shift = ((folded[name] - Q.float()) @ keys.float().T / 8).std().item()
    print(f"q · log₂e in {name:8}: scores are off by {shift:.2f}")

# %% [markdown]
# Rounding q shifts every score by about the same amount, 0.2 % of the typical score, even where the score itself is small.
# Here that is 0.02 in an exponent, so 2 % of a weight. And out?

# %%
for name, folded_in in folded.items():
    ends = [list(states(blocks(folded_in, keys, V, P)))[-1].out for P in (1, 8)]
    few, many = (error(end, truth) for end in ends)
    print(f"q · log₂e in {name:8}: out is off by {few:.0e} in one block, {many:.0e} in 8")
largest = (Q.float() @ keys.float().T / 8).softmax(-1).amax(-1)
print(f"the largest weight of a row: {largest.median().item():.2f} in the median row")

# %% [markdown]
# out is better off than a weight: a key that has nearly all the weight keeps it, for the weights are divided by their sum.
# The error does not grow with P: it happens before the merges.
#
# ## 8 · Choosing a tolerance
#
# A test as found in several packages: `allclose(x, truth, atol=1e-2)`. We feed it five results of a backward pass in
# float32: the right one; dK and dV swapped; dK halved; zeros; and the right one, rounded to bfloat16 once (8 of 24 digits
# are left).

# %%
# out by the ring on 8 ranks, lse the truth in float32, gradients by blocks: not the plainest.
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
# All pass. With a loss that is a mean over tokens, gradients are tiny, and *zero* is within 1e-2 of anything
# tiny. An absolute tolerance does not know how large the numbers are. A relative one does, if it is measured well:

# %% tags=["nbval-ignore-output"]
x, t = right.out.double(), torch.from_numpy(true.out)
entries = ((x - t).abs() / t.abs()).flatten()
print(f"the right output, norm over norm:      {error(right.out, true.out):.0e}")
print(f"the same, entry by entry, the worst:   {entries.max().item():.0e}")

# %% [markdown]
# Entry by entry even the right result looks bad, because some entry is nearly zero and its rounding is not. So divide
# norm by norm, or the largest error by the largest entry. A NaN must count as infinitely wrong. Every comparison with
# NaN is false, so write the test as `error <= bound`, which then fails, and not as `error > bound`, which lets it pass.
#
# *How much*? Do not guess: **measure how wrong an honest program is.** Take the plainest implementation, in the same dtype,
# on the same inputs; compare it with the float64 oracle; allow twice its error. `ringlab.conformance.tolerance` does that,
# for the largest error over the largest entry. It adds a floor of a rounding or two, because the plainest may be exactly
# right by luck.

# %% tags=["nbval-ignore-output"]
bounds = tolerance.bounds(q, k, v, dout, true=true)
print("bounds:", ", ".join(f"{name} {bound:.0e}" for name, bound in bounds.items()))

# %%
for name, result in gradients.items():
    found = tolerance.errors(result, true)
    wrong = [n for n in tolerance.NAMES if not found[n] <= bounds[n]]
    print(f"{name:18} fails on: {', '.join(wrong) or 'nothing'}")

# %% [markdown]
# Every wrong one fails and the right one passes, with a relative bound of a few 1e-6. For large scores, or
# in bfloat16, the plainest implementation is further off, and the bound follows.
#
# That is also its limit. The plainest bfloat16 attention is so far off that a state whose out is rounded at every merge
# passes, too (here we measure norm over norm again):

# %%
plainest = torch.softmax(inputs[0] @ inputs[1].T / 64**0.5, -1) @ inputs[2]
exact = error_curves.truth(*inputs)
honest = error(plainest, exact)
ends = [list(states(blocks(*inputs, P), out=narrow))[-1].out for P in (8, 32)]
few, many = (error(end, exact) for end in ends)
print(f"plainest bf16: error {honest:.0e}, so {2 * honest:.0e} is allowed")
for P, found in ((8, few), (32, many)):
    print(f"running out in bf16, {P:2} blocks: error {found:.0e}, passes: {found <= 2 * honest}")

# %% [markdown]
# A tolerance sees a level; **a curve sees a shape**. Test in float32, where a bfloat16 state stands
# out by a factor of thousands, and watch the error against P.
#
# ## Recap
#
# - Floating-point sums depend on their order. A ring adds in another order than one device: other bits, the same
#   accuracy.
# - One rounding to bfloat16 costs 1.7e-3, norm over norm; the worst single number is off by the unit roundoff, 3.9e-3.
#   With a float32 state the ring's error stays at one rounding or below, whatever P is. With a rounded out or lse it
#   grows like √(P/2) for many blocks, and lse costs more, because it is used in an exponent.
# - float32: lse, out and the sums, delta, dK and dV on their way. bfloat16: what is only multiplied, and the final
#   result.
# - Fix the order of the merges, and virtual ranks, processes and tomorrow's run agree bit for bit.
# - Tolerance: relative, against float64, twice the plainest implementation's error in the same dtype. NaN fails.
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
