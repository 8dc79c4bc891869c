"""The GPU that each process takes, and the check that no two ranks take the same GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringlab.errors import BackendError

_REMEDY = (
    "torchrun sets LOCAL_RANK; under SLURM without torchrun, either start each task with --gpus-per-task=1, "
    "or show every task all GPUs and export LOCAL_RANK=$SLURM_LOCALID"
)


def device_of(local_rank: int) -> int:
    """Return the number of the GPU that the process with this LOCAL_RANK takes among the GPUs that it sees.

    A process that sees a single GPU takes this GPU, because a scheduler may show each process only its own.

    Raises: BackendError if no GPU has this number.
    """
    gpus = torch.cuda.device_count()
    if gpus == 1:
        return 0
    if local_rank >= gpus:
        raise BackendError(f"a GPU for LOCAL_RANK {local_rank}", f"{gpus} GPUs", _REMEDY)
    return local_rank


def check_own_gpus(transport: str) -> None:
    """Check that the current devices of all ranks of the default group are different GPUs.

    All ranks must call this function. They compare the identifiers of their GPUs on the CPU, over gloo,
    because two NCCL ranks on one GPU would wait for each other forever, or fail with an obscure NCCL error.

    Raises: BackendError on all ranks, with the ranks that share a GPU.
    """
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    own = torch.frombuffer(bytearray(gpu.encode()), dtype=torch.uint8)  # all identifiers are equally long
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    ranks_of: dict[str, list[str]] = {}
    for rank, found in enumerate(gathered):
        ranks_of.setdefault(found.numpy().tobytes().decode(), []).append(str(rank))
    shared = [f"ranks {', '.join(ranks)} on GPU-{of}" for of, ranks in ranks_of.items() if len(ranks) > 1]
    if shared:
        raise BackendError(
            f"a GPU of its own for each rank, for transport '{transport}'",
            "; ".join(shared),
            f"{_REMEDY}; or transport='shared-gpu', if ranks are to share a GPU",
        )
