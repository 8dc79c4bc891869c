"""Compiled calls over a ring. They run on processes, because the tests' shape checks break tracing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringlab.nn.transformer as transformer
from ringlab import (
    Mask,
    ShardedCache,
    VirtualCluster,
    attention,
    contiguous,
    decode,
    latent_attention,
    ring_attention,
    zigzag,
)
from ringlab.blocks.naive import Naive
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.errors import RinglabError
from ringlab.handles import Handled
from ringlab.layout import Layout
from ringlab.nn.context import Context
from ringlab.serving import PagedCache, decode_heads
from tests.trainer.model import Model, share_over

S, H, K, D = 16, 4, 4, 8
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Compared:
    """The comparison of a compiled function with the function itself.

    same: whether results and gradients have the same bits. off: the largest difference. graphs, breaks: how
    many of each the compiler made.
    """

    same: bool
    off: float
    graphs: int
    breaks: int


def results_of(function: Callable[..., Any], leaves: Tensors) -> Tensors:
    """Return results and gradients of a loss on the squares of all results."""
    leaves = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in leaves)
    made = function(*leaves)
    made = (made,) if isinstance(made, Tensor) else made
    if any(x.requires_grad for x in made):
        torch.stack([x.square().sum() for x in made]).sum().backward()
    return *(x.detach() for x in made), *(x.grad for x in leaves if x.grad is not None)


def compared(
    function: Callable[..., Any], *leaves: Tensor, how: str = "aot_eager", fullgraph: bool = True
) -> Compared:
    torch._dynamo.reset()
    counters.clear()
    true = results_of(function, leaves)
    found = results_of(torch.compile(function, backend=how, fullgraph=fullgraph), leaves)
    same = len(found) == len(true) and all(map(torch.equal, found, true))
    off = max((x - y).abs().max().item() for x, y in zip(found, true, strict=True))
    return Compared(same, off, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def leaves_of(ring: Ring, layout: Layout | None = None, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return this rank's q, k and v."""
    layout = layout or zigzag(S, ring.world_size)
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(1, heads, layout.S, D, generator=generator) for heads in (H, K, K))
    return tuple(layout.shard(x.to(dtype), ring.rank).requires_grad_() for x in whole)


def attend(ring: Ring, *qkv: Tensor, layout: Layout | None = None, **options: Any) -> Any:
    options = {"block": "naive", "layout": layout or zigzag(S, ring.world_size)} | options
    return ring_attention(*qkv, ring=ring, **options)


def of_call(ring: Ring, **options: Any) -> Compared:
    layout = zigzag(S, ring.world_size)
    return compared(lambda q, k, v: attend(ring, 2 * q, k, v, layout=layout, **options), *leaves_of(ring))


def alone(ring: Ring) -> Ring:
    return Ring(SubGroup(ring.comm, [ring.rank]))


# Layers and models.


def layer_of(**config: Any) -> transformer.Layer:
    torch.manual_seed(0)
    return transformer.Layer(transformer.ModelConfig(width=H * D, heads=H, hidden=16, **config))


def of_layer(ring: Ring) -> tuple[Callable[..., Tensor], Tensors]:
    """Return a layer over the ring as a function of its input and its weights, and these tensors."""
    layer, context = layer_of(), Context(ring, zigzag(S, ring.world_size), Mask(documents=(7, 9)))
    names = [name for name, _ in layer.named_parameters()]

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, context))

    x = torch.randn(2, len(context.positions), H * D, requires_grad=True)
    return forward, (x, *layer.parameters())


def a_layer(ring: Ring) -> Compared:
    forward, leaves = of_layer(ring)
    return compared(forward, *leaves)


def inductor(forward: Callable[..., Any], leaves: Tensors) -> list[tuple[float, float]]:
    """Return the errors of inductor and of eager against float64, of each result and of each gradient."""
    torch._dynamo.reset()
    exact = results_of(forward, tuple(x.detach().double().requires_grad_() for x in leaves))
    made = [results_of(f, leaves) for f in (torch.compile(forward, fullgraph=True), forward)]
    return [
        tuple((x.double() - true).norm().item() / true.norm().item() for x in found)
        for *found, true in zip(*made, exact, strict=True)
    ]


def lengths(ring: Ring) -> list[tuple[bool, int]]:
    """Return whether bits are the same, and the number of graphs so far, for sequences of several lengths."""
    torch._dynamo.reset()
    counters.clear()
    layer, found = layer_of(), []
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for length in (8, 12, 16, 20):
        context = Context(ring, zigzag(length, ring.world_size), Mask(documents=(length - 3, 3)))
        x = torch.randn(1, len(context.positions), H * D)
        same = all(
            map(torch.equal, *(results_of(partial(f, context=context), (x,)) for f in (layer, compiled)))
        )
        found.append((same, counters["stats"]["unique_graphs"]))
    return found


def model(ring: Ring, validate: bool) -> Compared:
    of_model = Model()
    names = [name for name, _ in of_model.named_parameters()]

    class Given(nn.Module):
        def forward(self, *arguments: Any) -> Tensor:
            return torch.func.functional_call(of_model, self.weights, arguments)

    given = Given()

    def loss(*weights: Tensor) -> Tensor:
        given.weights = dict(zip(names, weights, strict=True))
        return share_over(ring, given, validate=validate)

    compiled: list[Any] = []

    def other(*weights: Tensor) -> Tensor:
        given.weights = dict(zip(names, weights, strict=True))
        return share_over(ring, compiled[0], validate=validate)

    torch._dynamo.reset()
    counters.clear()
    compiled.append(torch.compile(given, backend="aot_eager", fullgraph=True))
    weights = tuple(of_model.parameters())
    true, found = results_of(loss, weights), results_of(other, weights)
    return Compared(all(map(torch.equal, true, found)), 0.0, counters["stats"]["unique_graphs"], 0)


# Checkpoints.


def selective(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a checkpoint that keeps the results of attention, and of nothing else."""

    def policy(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keep = operator in (
            torch.ops.ringlab.attention.default,
            torch.ops.ringlab.latent_attention.default,
        )
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, function, use_reentrant=False, context_fn=context)


def recomputed(
    ring: Ring, checkpointed: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[Compared, int]:
    """Compare a checkpoint of two calls, and return the number of forwards of the compiled one."""
    layout, begun = zigzag(S, ring.world_size), []

    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(ring, attend(ring, q.sin(), k, v, layout=layout), k, v, layout=layout)

    plain = attention.begin

    def counting(given: Any) -> Any:
        begun.append(given.modes is not None)
        return plain(given)

    attention.begin = counting
    found = compared(checkpointed(two), *leaves_of(ring))
    attention.begin = plain
    return found, sum(begun)


def selective_layer(ring: Ring) -> list[tuple[float, float]]:
    """Return the errors of a layer that computes its rotated q and k again in backward."""
    forward, leaves = of_layer(ring)
    return inductor(selective(forward), leaves)


def selective_sinks(ring: Ring) -> list[tuple[float, float]]:
    """Return the errors of a call that computes its sinks again in backward.

    Its second result has as many numbers as the sinks, whose memory inductor gives it.
    """
    layout = zigzag(S, ring.world_size)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensors:
        out = attend(ring, q, k, v, layout=layout, sinks=2 * sinks, schedule="ulysses")
        return out, out.sum((0, 2, 3))

    return inductor(selective(call), (*leaves_of(ring), torch.linspace(-1, 1, H).requires_grad_()))


# Modes and errors.


def text_of(program: Callable[[], Any]) -> str:
    try:
        return f"nothing: {program()}"
    except RinglabError as error:
        return f"{type(error).__name__}: {error}"


def compiled_call(ring: Ring, backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    layout = zigzag(S, ring.world_size)
    call = partial(attend, ring, layout=layout, **options)
    return torch.compile(call, backend=backend, fullgraph=True)


def second(ring: Ring) -> str:
    q, k, v = leaves_of(ring)
    out = compiled_call(ring, "eager")(q, k, v)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    return text_of(lambda: gradient.sum().backward())


def differing(ring: Ring) -> str:
    """Return the error of a call in which rank 1 alone passes another scale."""
    call = compiled_call(ring, scale=0.5 + 0.5 * ring.rank)
    return text_of(lambda: call(*leaves_of(ring)))


def wrong(ring: Ring) -> str:
    """Return the error of a call in which rank 1 alone passes too few tokens."""
    call = compiled_call(ring)
    q, k, v = leaves_of(ring)
    return text_of(lambda: call(q, *(x[:, :, : S // 2 - ring.rank] for x in (k, v))))


def beside_eager(ring: Ring) -> str:
    """Return the text of a run in which rank 1 alone is compiled, and nothing differs."""
    call = compiled_call(ring) if ring.rank else partial(attend, ring)
    out = call(*leaves_of(ring))
    out.sum().backward()
    return text_of(lambda: out.shape)


def under_autocast(ring: Ring) -> Compared:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(ring, q, k, v, layout=layout).float()

    layout = zigzag(S, ring.world_size)
    return compared(call, *leaves_of(ring))


def objects(ring: Ring) -> list[str]:
    """Return the names of the blocks that calls with different objects used, in one compiled function."""
    used: list[str] = []

    class Named(Naive):
        def __init__(self, word: str) -> None:
            self.word = word

        def forward(self, *args: Any, **options: Any) -> Any:
            used.append(self.word)
            return super().forward(*args, **options)

    torch._dynamo.reset()
    layout = zigzag(S, 1)
    one = alone(ring)
    call = torch.compile(
        lambda block, *qkv: attend(one, *qkv, layout=layout, block=block), backend="aot_eager", fullgraph=True
    )
    for word in ("first", "second", "third"):
        call(Named(word), *leaves_of(one))
    return used


def without_handle(ring: Ring) -> Compared:
    """Pass a block that is not Handled, which ends the graph."""

    class Bare:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    inner, layout = Naive(), zigzag(S, ring.world_size)
    bare = Bare()
    function = lambda *qkv: attend(ring, *qkv, layout=layout, block=bare)  # noqa: E731
    return compared(function, *leaves_of(ring), fullgraph=False)


def seed_of_65_bits(ring: Ring) -> str:
    torch._dynamo.reset()
    call = partial(attend, ring, layout=zigzag(S, ring.world_size), dropout=0.5, seed=1 << 64)
    return text_of(lambda: torch.compile(call, backend="eager")(*leaves_of(ring)))


def made_inside(ring: Ring) -> list[bool]:
    """Return whether calls that make their mask inside the compiled function are right."""

    def call(width: int, *qkv: Tensor) -> Tensor:
        return attend(ring, *qkv, layout=layout, mask=Mask(window=width))

    torch._dynamo.reset()
    layout, compiled = zigzag(S, ring.world_size), torch.compile(call, backend="eager")
    return [
        torch.equal(compiled(width, *leaves_of(ring)), call(width, *leaves_of(ring)))
        for width in (3, 5, 5, 3)
    ]


def latent_leaves(ring: Ring, layout: Layout, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return this rank's q, latent and k_rope, and w_k and w_v, which all ranks have."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, H, layout.S, D), (1, layout.S, 5), (1, layout.S, 2), (H, D - 2, 5), (H, 6, 5)
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return tuple(x.requires_grad_() for x in (*layout.shard(tuple(whole[:3]), ring.rank), *whole[3:]))


def latent(ring: Ring, **options: Any) -> Compared:
    layout = zigzag(S, ring.world_size)
    given = {"ring": ring, "layout": layout, "block": "naive"} | options
    return compared(
        lambda q, *others: latent_attention(2 * q, *others, **given), *latent_leaves(ring, layout)
    )


def inductor_latent(ring: Ring) -> list[tuple[float, float]]:
    layout = zigzag(S, ring.world_size)
    call = partial(latent_attention, ring=ring, layout=layout, block="naive")
    return inductor(selective(lambda q, *others: call(q.sin(), *others)), latent_leaves(ring, layout))


def latent_under_autocast(ring: Ring) -> Compared:
    layout = zigzag(S, ring.world_size)

    def call(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return latent_attention(*tensors, ring=ring, layout=layout, block="naive").float()

    return compared(call, *latent_leaves(ring, layout))


def latent_errors(ring: Ring) -> list[str]:
    """Return the texts of a compiled call that is wrong on rank 1, and of an eager one beside a compiled one."""
    torch._dynamo.reset()
    layout = zigzag(S, ring.world_size)
    q, latent, k_rope, w_k, w_v = latent_leaves(ring, layout)
    call = partial(latent_attention, ring=ring, layout=layout, block="naive")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    wrong = text_of(lambda: compiled(q, latent, k_rope, w_k[:, : D - 2 - ring.rank], w_v))
    beside = (compiled if ring.rank else call)(q, latent, k_rope, w_k, w_v)
    beside.sum().backward()
    return [wrong, text_of(lambda: tuple(beside.shape))]


# Lifetimes.


def alive(kind: type) -> int:
    gc.collect()
    return sum(isinstance(x, kind) for x in gc.get_objects() if isinstance(x, Handled))


def lives(ring: Ring) -> dict[str, int]:
    """Return how many calls are kept at five times.

    They are: before three calls, after them, after one backward, after all results are dropped, and after a call
    without gradients.
    """
    call, kind = compiled_call(ring), attention._Kept
    found = {"before": alive(kind)}
    outs = [call(*leaves_of(ring)) for _ in range(3)]
    found["in flight"] = alive(kind)
    outs[0].sum().backward()
    found["after one backward"] = alive(kind)
    del outs
    found["dropped"] = alive(kind)
    with torch.no_grad():
        out = call(*leaves_of(ring))
    found["no_grad"] = alive(kind)
    del out
    return found


def objects_that_died(ring: Ring) -> tuple[bool, bool]:
    """Return whether backward works without other references to a block, and whether the block is then freed."""
    q, k, v = leaves_of(ring)
    block = Naive()
    gone = weakref.ref(block)
    out = compiled_call(ring, block=block)(q, k, v)
    torch._dynamo.reset()
    del block
    gc.collect()
    out.sum().backward()
    del out
    gc.collect()
    return q.grad is not None, gone() is None


def stale(ring: Ring) -> str:
    """Run backward after the memory of the ticket was replaced by a copy's, as a hook may do."""
    call = compiled_call(ring)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = call(*leaves_of(ring))
    gc.collect()
    return text_of(lambda: out.sum().backward())


# Decode.


class Step(nn.Module):
    """A layer that appends its token to the cache, and attends to the cache."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.call = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D), call

    def forward(self, x: Tensor, cache: Any, *sequences: Any) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        cache.append(k, v, *sequences)
        out = self.call(q, cache, *sequences)
        return out.transpose(1, 2).flatten(2)


def decoded(ring: Ring, paged: bool) -> list[tuple[bool, int]]:
    """Return whether each of several tokens has the same bits, and the number of graphs so far."""
    torch._dynamo.reset()
    counters.clear()
    half = H // ring.world_size

    def of_heads(q: Tensor, cache: Any, sequences: list[int]) -> Tensor:
        own = q[:, ring.rank * half : (ring.rank + 1) * half]
        return decode_heads(own, cache, sequences, block="naive")

    step = Step(of_heads if paged else partial(decode, block="naive"))
    compiled, found = torch.compile(step, backend="aot_eager", fullgraph=True), []
    for _ in range(2):
        if paged:
            caches = [PagedCache(ring, kv_heads=K, head_dim=D, pages=8) for _ in range(2)]
            more: tuple[Any, ...] = ([cache.add() for cache in caches][:1],)
        else:
            caches = [ShardedCache(ring, batch=1, kv_heads=K, head_dim=D) for _ in range(2)]
            more = ()
        for _ in range(5):
            x = torch.randn(1, 1, H * D, generator=torch.Generator().manual_seed(len(found)))
            with torch.no_grad():
                one, other = (f(x, cache, *more) for f, cache in zip((step, compiled), caches, strict=True))
            found.append((torch.equal(one, other), counters["stats"]["unique_graphs"]))
    return found


# Virtual ranks.


def on_virtual_ranks(ring: Ring) -> list[bool]:
    torch._dynamo.reset()
    layout = zigzag(S, 2)

    def program(virtual: Ring) -> bool:
        call = partial(attend, virtual, layout=layout)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        return all(map(torch.equal, *(results_of(f, leaves_of(virtual)) for f in (call, compiled))))

    return VirtualCluster(2, memory=False).run(program).results


# torch's own checks of operators.


class Latest(Handled):
    """The call that was kept last, so that every ticket has the same number.

    opcheck runs an operator twice, and requires equal results.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["kept"], name)

    def ticket_of(self, kept: Handled) -> Tensor:
        self.__dict__["kept"] = kept
        return torch.tensor(self.handle)


def checked(ring: Ring) -> dict[str, str]:
    """Return what torch.library.opcheck says of each operator."""
    one, layout, order = alone(ring), contiguous(S, 1), torch.zeros((), dtype=torch.int64)
    q, k, v = leaves_of(one, layout, torch.float64)
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    token, query = torch.randn(1, K, 1, D), torch.randn(1, H, 1, D)
    cache, pages = (
        ShardedCache(one, batch=1, kv_heads=K, head_dim=D),
        PagedCache(one, kv_heads=K, head_dim=D, pages=9),
    )
    cache.append(token, token)
    pages.append(token, token, [pages.add()])
    handles = [one.handle, layout.handle, 0, 0, 0]

    def call(lse: bool, *tensors: Tensor) -> tuple[Any, ...]:
        named = None, handles, "naive", "ring", None, None, None, 0.0, None
        return [q, k, v, *tensors], *named, lse, True, True, None

    def of_heads(shares: int) -> tuple[Any, ...]:
        how = [0], None, "own", None, "all-to-all", "naive", None, None, False, True
        return order, query, None, [pages.handle, 0, 0, 0], *how, shares, D

    operators, latest, kept = torch.ops.ringlab, Latest(), attention.ticket_of
    attention.ticket_of = latest.ticket_of
    out, lse, ticket = operators.attention(*call(True))
    gradients = out.detach(), lse.detach(), ticket, out.detach(), [x.detach() for x in (q, k, v)]
    latents = [
        x if x.ndim == 4 or n > 2 else x[:, None]
        for n, x in enumerate(latent_leaves(one, layout, torch.float64))
    ]
    of_latents = [x.detach().requires_grad_() for x in latents]
    found = {
        "attention_backward": opchecked(operators.attention_backward, gradients),
        "attention": opchecked(operators.attention, call(False)),
        "attention, lse and sinks": opchecked(operators.attention, call(True, sinks)),
        "decode": opchecked(
            operators.decode,
            (order, query, None, [cache.handle, 0, 0], "naive", None, None, "tree", True, True, D),
        ),
        "decode_heads": opchecked(operators.decode_heads, of_heads(1)),
        # a second run appends a second time, so results cannot be compared
        "append": opchecked(
            operators.append,
            (order, token, token, cache.handle, None, None),
            ("test_schema", "test_faketensor"),
        ),
        "latent_attention": opchecked(
            operators.latent_attention,
            (of_latents, handles, "naive", "ring", None, None, False, True, True, None),
        ),
    }
    attention.ticket_of = kept
    return found


def opchecked(operator: Any, arguments: tuple[Any, ...], which: tuple[str, ...] = ()) -> str:
    try:
        found = torch.library.opcheck(operator.default, arguments, **({"test_utils": which} if which else {}))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return " ".join(sorted(set(found.values())))


def unsafe_for_cuda_graphs(ring: Ring) -> list[str]:
    """Return the operators of ringlab, among all that are tagged as unsafe for CUDA graphs."""
    named = ("attention", "attention_backward", "latent_attention", "append", "decode", "decode_heads")
    operators = {name: getattr(torch.ops.ringlab, name).default for name in named}
    return [name for name, operator in operators.items() if torch.Tag.cudagraph_unsafe in operator.tags]


def with_sinks(ring: Ring, schedule: str) -> Compared:
    layout = zigzag(S, ring.world_size)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return attend(ring, q, k, v, layout=layout, sinks=sinks, schedule=schedule, return_lse=True)

    return compared(call, *leaves_of(ring), torch.linspace(-1, 1, H).requires_grad_())


PROGRAMS: dict[str, Callable[[Ring], Any]] = {
    "layer": a_layer,
    "lengths": lengths,
    "model, validate": partial(model, validate=True),
    # The compiler sees one operator, whatever its schedule and block.
    **{f"schedule {name}": partial(of_call, schedule=name) for name in ("ring", "ulysses", "double-ring")},
    "block native": partial(of_call, block="native"),
    "lse": partial(of_call, return_lse=True),
    "rules": partial(of_call, softcap=5.0, dropout=0.25, seed=2**64 - 3, causal=False, scale=0.3),
    "mask": partial(of_call, mask=Mask(window=5)),
    "checkpoint": partial(
        recomputed, checkpointed=lambda function: partial(checkpoint, function, use_reentrant=False)
    ),
    "selective checkpoint": partial(recomputed, checkpointed=selective),
    "second": second,
    "differing": differing,
    "wrong": wrong,
    "beside eager": beside_eager,
    "autocast": under_autocast,
    "objects": objects,
    "without handle": without_handle,
    "latent": latent,
    "latent, all-gather": partial(latent, schedule="allgather", mask=Mask(window=5), validate=False),
    "latent, autocast": latent_under_autocast,
    "latent, errors": latent_errors,
    "seed": seed_of_65_bits,
    "made inside": made_inside,
    "lives": lives,
    "objects that died": objects_that_died,
    "stale": stale,
    "decode": partial(decoded, paged=False),
    "decode_heads": partial(decoded, paged=True),
    "virtual": on_virtual_ranks,
    "checked": checked,
    "tags": unsafe_for_cuda_graphs,
    "inductor, layer, selective checkpoint": selective_layer,
    "inductor, sinks, selective checkpoint": selective_sinks,
    "inductor, latent": inductor_latent,
    **{f"sinks {name}": partial(with_sinks, schedule=name) for name in ("ring", "ulysses")},
}


def answers(ring: Ring, *names: str) -> dict[str, Any]:
    return {name: PROGRAMS[name](ring) for name in names}
