"""The division of the GPUs: dp × tp × ring × ulysses × pp, and the place of each group in the nodes.

GPUs are numbered so that tensor-parallel groups vary fastest, then Ulysses groups, rings, replicas and the
stages of a pipeline. Thus the groups that communicate most are closest together.

A group with m members on one node uses their m links out of the node in parallel, as the collective
libraries do; a single message between two ranks uses one link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from ringlab.cost.hardware import Hardware, Link
from ringlab.cost.models import Layer
from ringlab.cost.planner.request import Request
from ringlab.errors import CostError

# The most ranks in a ring, because the table of work has so many rows (ranks) and columns (steps).
MOST_IN_A_RING = 1024


@dataclass(frozen=True)
class Degrees:
    """One way to divide the GPUs; `fsdp` of a stage's dp × cp ranks share one copy of its weights.

    `ep` of the dp × cp ranks share the experts of a layer, and tokens go to them and back. If `fsdp` is larger,
    the ranks that hold the same experts divide these further.
    """

    dp: int
    tp: int
    ring: int
    ulysses: int
    fsdp: int
    pp: int = 1
    ep: int = 1

    @property
    def cp(self) -> int:
        """Return the number of ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def replicas(self) -> int:
        """Return the number of copies of the weights, each shared by `fsdp` ranks."""
        return self.dp * self.cp // self.fsdp

    @property
    def spans(self) -> dict[str, int]:
        """Return the number of neighbouring GPUs that each group spans."""
        return {
            "tp": self.tp,
            "ulysses": self.tp * self.ulysses,
            "ring": self.tp * self.cp,
            "fsdp": self.tp * self.fsdp,
            "ep": self.tp * self.ep,
            "replicas": self.gpus // self.pp,
            "pp": self.gpus,
        }

    def crosses(self, group: str, ranks_per_node: int) -> bool:
        """Return whether any group of this kind has members on two nodes."""
        span = self.spans[group]
        return getattr(self, group) > 1 and (ranks_per_node % span != 0)

    def kv_heads(self, kv_heads: int) -> int:
        """Return the number of K/V heads of one rank: at least one, because heads are replicated if ranks outnumber them."""
        return max(1, kv_heads // (self.tp * self.ulysses))

    def kv_copies(self, kv_heads: int) -> int:
        """Return the number of ranks that hold the same K/V head: above 1 if ranks outnumber heads."""
        return max(1, self.tp * self.ulysses // kv_heads)


def divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order."""
    small = [each for each in range(1, int(n**0.5) + 1) if n % each == 0]
    return sorted({*small, *(n // each for each in small)})


def nearest_divisors(n: int, wanted: int) -> str:
    """Return the divisors of n just below and above `wanted`, in words."""
    below = [each for each in divisors(n) if each <= wanted][-1:]
    above = [each for each in divisors(n) if each > wanted][:1]
    return " or ".join(str(each) for each in below + above)


def candidates(request: Request) -> list[Degrees]:
    """Return every way to divide the GPUs that satisfies the request.

    TP and Ulysses degrees that are left open stay inside a node and split the K/V heads evenly. Degrees that
    are given may cross nodes and replicate K/V heads.
    Raises: CostError that names the violated constraint if no way satisfies the request.
    """
    _check_heads(request)
    _check_pipeline(request)
    _check_products(request)
    _check_experts(request)
    found = list(_enumerate(request))
    if not found:
        opened = _opened(request)
        candidates(opened)  # raises the error if no degrees are possible
        raise CostError(
            f"degrees with {_product(request)}, cp = ring × ulysses",
            _asked(request),
            f"leave some of them open: {opened.command()}",
        )
    fitting = [each for each in found if each.cp <= request.tokens]
    if not fitting:
        least = min(each.cp for each in found)
        raise CostError(
            f"at least one token per rank: cp <= {request.tokens} tokens",
            f"cp={least} ranks that share one sequence",
            f"fewer nodes, a larger batch with --dp, or at least {least} tokens",
        )
    followed = [each for each in fitting if each.ring <= MOST_IN_A_RING]
    if not followed:
        raise CostError(
            f"rings of at most {MOST_IN_A_RING} ranks",
            f"ring={min(each.ring for each in fitting)}",
            "fewer nodes, or a larger batch: replicas have rings of their own",
        )
    return followed


def _opened(request: Request) -> Request:
    """Return the request with as few degrees left open as are needed to divide the GPUs."""
    tried = (
        ("cp", "ring", "ulysses", "fsdp", "ep"),
        ("cp", "ring", "ulysses", "fsdp", "ep", "tp"),
        ("cp", "ring", "ulysses", "fsdp", "ep", "tp", "dp"),
    )
    opened = (request.but(**dict.fromkeys(names)) for names in tried)
    return next(each for each in opened if any(_enumerate(each)))


def _enumerate(request: Request) -> Iterator[Degrees]:
    for tp in _tensor_degrees(request):
        for dp in [request.dp] if request.dp else divisors(gcd(request.batch, request.stage_gpus)):
            if request.stage_gpus % (tp * dp):
                continue
            if request.interleave > 1 and request.batch // dp % request.pp:
                continue
            cp = request.stage_gpus // (tp * dp)
            if request.cp not in (None, cp):
                continue
            for ulysses in _ulysses_degrees(request, tp, cp):
                ring = cp // ulysses
                if request.ring in (None, ring) and _heads_fit(request, tp * ulysses):
                    for fsdp in _sharding_degrees(request, tp, dp * cp):
                        for ep in _expert_degrees(request, tp, dp * cp, fsdp):
                            yield Degrees(dp, tp, ring, ulysses, fsdp, request.pp, ep)


def _tensor_degrees(request: Request) -> list[int]:
    if request.tp:
        return [request.tp]
    kinds = request.sized.kinds
    return [
        tp
        for tp in divisors(request.machine.ranks_per_node)
        if request.stage_gpus % tp == 0
        and not any(shared % tp for it in kinds for shared in (it.H, it.dealt_heads, *it.widths))
    ]


def _ulysses_degrees(request: Request, tp: int, cp: int) -> list[int]:
    if request.ulysses:
        return [request.ulysses] if cp % request.ulysses == 0 else []
    if request.decoding:
        return [1]
    if request.ring:
        return [cp // request.ring] if cp % request.ring == 0 else []
    if _latent(request):
        return [1]
    inside, heads = request.machine.ranks_per_node, [it.K for it in request.sized.kinds if not it.linear]
    return [
        each
        for each in divisors(cp)
        if each == 1 or (inside % (tp * each) == 0 and not any(K % (tp * each) for K in heads))
    ]


def _sharding_degrees(request: Request, tp: int, ranks: int) -> list[int]:
    if request.fsdp:
        return [request.fsdp] if ranks % request.fsdp == 0 else []
    if request.decoding:
        return [1]
    inside = gcd(ranks, max(1, request.machine.ranks_per_node // tp))
    return sorted({1, inside, ranks})


def _expert_degrees(request: Request, tp: int, ranks: int, fsdp: int) -> list[int]:
    """Return the degrees of expert parallelism to try: none, inside a node, and all ranks that the experts allow."""
    counts = [it.experts for it in request.sized.kinds if it.experts]
    if request.ep is None:
        if not counts or request.decoding:
            return [1]
        most = gcd(ranks, *counts)
        tried = {1, gcd(most, max(1, request.machine.ranks_per_node // tp)), most}
    else:
        tried = {request.ep} if ranks % request.ep == 0 else set()
    return sorted(ep for ep in tried if ep % fsdp == 0 or fsdp % ep == 0)


def _heads_fit(request: Request, ranks: int) -> bool:
    """Return whether `ranks` = tp × ulysses ranks can share the heads."""
    dealt = [it for it in request.sized.kinds if not it.linear]
    return not any(it.H % ranks or not _shared(it.dealt_heads, ranks) for it in dealt)


def _latent(request: Request) -> bool:
    return any(it.latent for it in request.sized.kinds)


def _shared(kv_heads: int, ranks: int) -> bool:
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


def _check_heads(request: Request) -> None:
    sizes, tp, ulysses = request.sized, request.tp or 1, request.ulysses or 1
    if request.decoding and ulysses > 1:
        raise CostError(
            f"{request.purpose} without ulysses: one new token has no sequence to exchange for heads",
            f"ulysses={ulysses}",
            "split the cache by tokens (--cp) and by heads (--tp)",
        )
    if ulysses > 1 and _latent(request):
        got = f"ulysses={ulysses} for {sizes.name}"
        raise CostError("a ring: latent attention has no K/V heads to deal out", got, "leave --ulysses out")
    for name, ranks in (("tp", tp), ("tp × ulysses", tp * ulysses)):
        for it in sizes.kinds:
            if not (it.linear and name == "tp × ulysses"):
                _check_kind(it, name, ranks)
    for width in (width for it in sizes.kinds for width in it.widths):
        if width % tp:
            raise CostError(
                f"tp that divides the feed-forward width {width}",
                f"tp = {tp}",
                f"the nearest: {nearest_divisors(width, tp)}",
            )


def _check_kind(it: Layer, name: str, ranks: int) -> None:
    """Check that `ranks` ranks, whose degree has this name, can share the heads of a kind of layer."""
    heads = "query heads" if not it.linear else "heads of v"
    if it.H % ranks:
        raise CostError(
            f"{name} that divides the H={it.H} {heads}",
            f"{name} = {ranks}",
            f"the nearest: {nearest_divisors(it.H, ranks)}",
        )
    if not _shared(it.dealt_heads, ranks):
        raise CostError(
            f"{name} that divides the K={it.dealt_heads} K/V heads, or is a multiple of them (then they are replicated)",
            f"{name} = {ranks}",
            f"the nearest that divides: {nearest_divisors(it.dealt_heads, ranks)}",
        )


def _check_experts(request: Request) -> None:
    ep, counts = request.ep or 1, [it.experts for it in request.sized.kinds if it.experts]
    if ep == 1:
        return
    if not counts:
        needed = f"ep for a model with experts, which {request.sized.name} has none of"
        raise CostError(needed, f"ep={ep}", "leave --ep out")
    if request.decoding:
        needed = (
            f"{request.purpose} without ep: the ranks that share the weights share each expert by its width"
        )
        raise CostError(needed, f"ep={ep}", "leave --ep out")
    most, ranks = gcd(*counts), request.stage_gpus // (request.tp or 1)
    if most % ep:
        remedy = f"the nearest: --ep {nearest_divisors(most, ep)}"
        raise CostError(f"ep that divides the {most} experts of a layer", f"ep={ep}", remedy)
    if ranks % ep:
        remedy = f"the nearest: --ep {nearest_divisors(gcd(most, ranks), ep)}"
        raise CostError(f"ep that divides dp × cp, here at most {ranks} ranks", f"ep={ep}", remedy)
    if request.fsdp and request.fsdp % ep and ep % request.fsdp:
        remedy = f"--ep {gcd(ep, request.fsdp)}, or leave --fsdp out"
        raise CostError(
            "ep that divides fsdp, or is a multiple of it", f"ep={ep}, fsdp={request.fsdp}", remedy
        )


def _check_pipeline(request: Request) -> None:
    pp, interleave, layers = request.pp, request.interleave, request.sized.layers
    if pp == 1:
        if interleave > 1:
            raise CostError(
                "a pipeline for interleave",
                f"interleave={interleave}, pp=1",
                "set --pp, or leave --interleave out",
            )
        return
    if not request.training:
        remedy = "--cp and --tp divide an inference; a pipeline would only add its bubble to one sequence"
        raise CostError("pp for training only", f"pp={pp} for {request.purpose}", remedy)
    if request.gpus % pp:
        remedy = f"the nearest: --pp {nearest_divisors(request.gpus, pp)}"
        raise CostError(f"pp that divides the {request.gpus} GPUs", f"pp={pp}", remedy)
    if pp > layers:
        most = max(each for each in divisors(request.gpus) if each <= layers)
        raise CostError(f"pp <= {layers} layers: every stage has one", f"pp={pp}", f"--pp {most}")
    if pp * interleave > layers + 2:
        needed = f"pp × interleave <= {layers + 2}: {layers} layers, and embedding and head for one each"
        remedy = f"--interleave {(layers + 2) // pp}"
        raise CostError(needed, f"{pp} × {interleave} = {pp * interleave}", remedy)
    replicas = request.dp or 1
    sequences = request.batch // replicas
    if interleave > 1 and sequences % pp:
        needed = "sequences of a replica, batch / dp, that pp divides where stages interleave"
        remedy = f"--batch {-(-sequences // pp) * pp * replicas}, or no --interleave"
        raise CostError(needed, f"{sequences} sequences, pp={pp}", remedy)


def _check_products(request: Request) -> None:
    if request.dp and request.batch % request.dp:
        more = -(-request.batch // request.dp) * request.dp
        raise CostError(
            "batch divisible by dp: every replica takes whole sequences",
            f"batch={request.batch}, dp={request.dp}",
            f"--batch {more}, or --dp {nearest_divisors(request.batch, request.dp)}",
        )
    if request.cp and request.ring and request.ulysses and request.ring * request.ulysses != request.cp:
        raise CostError(
            "ring × ulysses = cp",
            f"{request.ring} × {request.ulysses} = {request.ring * request.ulysses}, cp={request.cp}",
            f"--cp {request.ring * request.ulysses}, or leave one of the three out",
        )
    cp = request.cp or (request.ring and request.ulysses and request.ring * request.ulysses)
    product = (request.dp or 1) * (request.tp or 1) * (cp or (request.ring or 1) * (request.ulysses or 1))
    whole = request.dp is not None and request.tp is not None and bool(cp)
    gpus = request.stage_gpus
    if (whole and product != gpus) or gpus % product:
        others = (request.dp or 1) * (request.tp or 1)
        left = gpus // others
        inside = [f"--{name}" for name in ("ring", "ulysses") if left % (getattr(request, name) or 1)]
        given = others > 1 and gpus % others == 0
        raise CostError(
            f"{_product(request)} ({request.nodes} × {request.machine.ranks_per_node})",
            f"{_asked(request)}, product {product * request.pp}",
            f"cp={left} with this dp and tp" + (f", without {' and '.join(inside)}" if inside else "")
            if given
            else f"degrees that divide {gpus}: {', '.join(map(str, divisors(gpus)))}",
        )
    sharing = gpus // (request.tp or 1)  # left open, tp can be 1
    if request.fsdp and sharing % request.fsdp:
        raise CostError(
            f"fsdp that divides dp × cp, here {'' if request.tp else 'at most '}{sharing} ranks",
            f"fsdp={request.fsdp}",
            f"the nearest: --fsdp {nearest_divisors(sharing, request.fsdp)}",
        )


def _product(request: Request) -> str:
    return f"dp × tp × cp{' × pp' if request.pp > 1 else ''} = {request.gpus} GPUs"


def _asked(request: Request) -> str:
    names = ("dp", "fsdp", "tp", "cp", "ring", "ulysses", "ep")
    given = [f"{name}={getattr(request, name)}" for name in names if getattr(request, name)]
    given += [f"pp={request.pp}"] if request.pp > 1 else []
    return ", ".join(given) or "none asked for"


@dataclass(frozen=True)
class Group:
    """`size` communicating GPUs, `on_a_node` of them on each node; `across` if they span several nodes."""

    size: int
    on_a_node: int
    across: bool
    machine: Hardware

    @property
    def link(self) -> Link:
        """Return the slowest link between two neighbours of the group."""
        return self.machine.between if self.across else self.machine.inside

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes that one rank sends per second in a collective while all members send."""
        inside, between = self.machine.inside.bytes_per_s, self.machine.between.bytes_per_s
        return min(inside, self.on_a_node * between) if self.across else inside

    @property
    def latency_s(self) -> float:
        """Return the latency in seconds of a collective by recursive doubling, first inside the nodes, then across them."""
        inside = (self.on_a_node - 1).bit_length() * self.machine.inside.latency_s
        nodes = -(-self.size // self.on_a_node)
        return inside + (nodes - 1).bit_length() * self.machine.between.latency_s

    def gather_s(self, whole_bytes: float) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, of `whole_bytes` over the group."""
        if self.size == 1:
            return 0.0
        return self.latency_s + whole_bytes * (self.size - 1) / self.size / self.bytes_per_s

    def reduce_s(self, whole_bytes: float) -> float:
        """Return the seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(whole_bytes)

    def exchange_s(self, rank_bytes: float) -> float:
        """Return the seconds of an all-to-all in which every rank starts with `rank_bytes` and keeps its own part."""
        if self.size == 1:
            return 0.0
        part = rank_bytes / self.size
        near = (self.on_a_node - 1) * part / self.machine.inside.bytes_per_s
        far = (self.size - self.on_a_node) * part / self.machine.between.bytes_per_s if self.across else 0.0
        return self.link.latency_s + max(near, far)


def group(name: str, degrees: Degrees, machine: Hardware) -> Group:
    """Return the group of this kind ("tp", "ulysses", "ring", "fsdp", "ep" or "replicas"), placed in the nodes."""
    size: int = getattr(degrees, name)
    return placed(size, max(1, degrees.spans[name] // size), machine)


def placed(size: int, stride: int, machine: Hardware) -> Group:
    """Return a group of `size` GPUs, each `stride` GPUs after the one before it."""
    node = machine.ranks_per_node
    across = size > 1 and node % (size * stride) != 0
    return Group(size, min(size, max(1, node // stride)) if across else size, across, machine)
