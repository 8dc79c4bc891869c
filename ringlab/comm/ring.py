"""A transport as a ring: each rank sends to the next rank and receives from the previous rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from ringlab.comm.protocol import AnyTensor, Comm, Tensors, Work
from ringlab.errors import BackendError, ShapeError, WorldSizeError
from ringlab.handles import Handled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Ring(Handled):
    """Rank `rank` of `world_size` ranks in a circle, which sends to `next` and receives from `previous`.

    Programs receive a ring from `VirtualCluster`, `launch` or `connect`, or make one by `Ring.of_group`.

    Raises: BackendError for an object that is not a transport.

    >>> import torch
    >>> from ringlab import VirtualCluster
    >>> def program(ring):  # each rank sends its number once around the ring, and adds up what it sees
    ...     seen = total = torch.tensor([ring.rank])
    ...     for step in range(1, ring.world_size):
    ...         seen = ring.shift(seen)
    ...         assert seen.item() == ring.origin(step)
    ...         total = total + seen
    ...     return total.item()
    >>> VirtualCluster(4).run(program).results
    [6, 6, 6, 6]
    """

    def __init__(self, comm: Comm) -> None:
        if not isinstance(comm, Comm):
            raise BackendError(
                "a transport of ringlab.comm",
                f"a {type(comm).__name__}",
                "Ring.of_group for a process group or a DeviceMesh",
            )
        self.comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size
        self.next = (self.rank + 1) % self.world_size
        self.previous = (self.rank - 1) % self.world_size

    @classmethod
    def of_group(cls, group: ProcessGroup | DeviceMesh | None = None, timeout: float = 600.0) -> Ring:
        """Return the ring of a group that the program opened itself. Its processes keep their order.

        group: a process group of torch.distributed, a DeviceMesh of one dimension such as `mesh["cp"]`, or
        None for all processes. Every process of the group must call this method. Calls for the same group
        share a transport. The program must close the group itself. If the group has only NCCL, its processes
        open a gloo group too, for headers, which are CPU tensors.
        timeout: the seconds that a message may take, including time in which another rank saves or
        evaluates.

        Raises: BackendError if no process group is open, for an object that is not a group, or for a group
        of a backend other than gloo and NCCL; TransportTimeout if not all processes open the gloo group;
        WorldSizeError for a mesh of several dimensions, or a group without this process.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
        >>> Ring.of_group(mesh["cp"])
        Ring(rank=0, world_size=1, over DistributedComm)
        >>> dist.destroy_process_group()
        """
        from ringlab.comm.processes.group import comm_of_group

        return cls(comm_of_group(group, timeout))

    def __repr__(self) -> str:
        return f"Ring(rank={self.rank}, world_size={self.world_size}, over {type(self.comm).__name__})"

    def origin(self, step: int) -> int:
        """Return the rank whose K/V block this rank holds after `step` shifts."""
        return (self.rank - step) % self.world_size

    def post(
        self,
        *tensors: AnyTensor,
        length: int | None = None,
        into: Tensors | None = None,
        release_after_send: bool = False,
        hops: int | None = None,
        stride: int = 1,
        tag: str = "shift",
    ) -> Work:
        """Return the work of sending `tensors` to the next rank and receiving as many from the previous rank.

        `post` returns at once. The work's `wait` returns the received tensors, which have the shapes of the
        sent tensors. `post` calls the transport's `relay` if `hops` is passed, `hand_over` if
        `release_after_send` is true, and otherwise `exchange`.
        length: the number of tokens to receive, on axis −2, if ranks hold different numbers of tokens.
        into: the receive buffers; by default new tensors.
        release_after_send: whether the content of `tensors` may be undefined after `wait`, which may save a
        copy.
        hops: passed if `tensors` are a block that travels around the ring unchanged: the number of hops that
        it has made. A rank keeps its own block (hops 0), and gives up the blocks of other ranks.
        stride: how many ranks ahead to send, and from how many ranks behind to receive.

        Raises: ShapeError if an argument to send is not a tensor.
        """
        try:
            whole = all(map(Tensor.is_contiguous, tensors))
        except TypeError:
            raise _refusal(
                next(x for x in cast(tuple[Any, ...], tensors) if not isinstance(x, Tensor))
            ) from None
        if into is None:
            into = [_buffer_like(t, length) for t in tensors]
        sends = tensors if whole else tuple(t.contiguous() for t in tensors)
        receives, to, source = tuple(into), self.origin(-stride), self.origin(stride)
        comm = self.comm
        if hops is not None:
            return comm.relay(hops=hops, send=sends, to=to, receive=receives, source=source, tag=tag)
        post = comm.hand_over if release_after_send else comm.exchange
        return post(send=sends, to=to, receive=receives, source=source, tag=tag)

    def shift(self, *tensors: AnyTensor, length: int | None = None, tag: str = "shift") -> Any:
        """Return the tensors that the previous rank shifted: a tensor for one argument, else a tuple."""
        received = self.post(*tensors, length=length, tag=tag).wait()
        return received[0] if len(received) == 1 else received

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `function(*args, **kwargs)`, and time and trace the call under `label`."""
        return self.comm.compute(label, function, *args, **kwargs)

    def all_gather(self, tensor: AnyTensor, shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """Return every rank's tensor in rank order.

        shapes: the shape of each rank's tensor, if they differ.
        """
        return self.comm.all_gather(tensor, shapes)

    def all_reduce(self, tensor: AnyTensor, op: str = "sum") -> Tensor:
        """Return the sum or maximum over ranks, computed in rank order."""
        return self.comm.all_reduce(tensor, op)

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.comm.barrier()


def _refusal(value: Any) -> ShapeError:
    """Return the error for posting `value`, which is not a tensor."""
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return ShapeError(
        "tensors to send, each an argument of its own",
        f"a {type(value).__name__}{size}",
        "what shift and wait return for several tensors is a tuple: unpack it, k, v = ring.shift(k, v)",
    )


def _buffer_like(tensor: Tensor, length: int | None) -> Tensor:
    if length is None:
        return tensor.new_empty(tensor.shape)
    return tensor.new_empty((*tensor.shape[:-2], length, tensor.shape[-1]))


def check_ring(ring: Any) -> None:
    """Check that an argument `ring` is a Ring.

    Raises: WorldSizeError. Its remedy is the call that makes a Ring of a process group.
    """
    if isinstance(ring, Ring):
        return
    group = type(ring).__name__.startswith(("DeviceMesh", "ProcessGroup"))
    raise WorldSizeError(
        "ring= a ringlab.Ring",
        f"a {type(ring).__name__}",
        "Ring.of_group(it) makes one of a process group, or of a DeviceMesh of one dimension such as mesh['cp']"
        if group
        else "pass the ring that your program receives, or Ring.of_group(group)",
    )
