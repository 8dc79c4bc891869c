"""The contents of the course: the lessons in the order in which one reads them, the papers, and the capstone.

A lesson's number is its name, which old links and grades contain; it does not give the order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.errors import CourseError

PARTS = ("Foundations", "The ring", "On real machines", "In use", "Further")


@dataclass(frozen=True)
class Paper:
    """A published idea: `gives` says what the paper adds, and `after` names the papers that it builds on."""

    key: str
    year: int
    name: str
    arxiv: str
    gives: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lesson:
    """One lesson: what a learner can do afterwards, its duration, and the lessons and papers it needs."""

    id: str
    name: str
    title: str
    part: str
    minutes: int
    afterwards: str
    needs: tuple[str, ...] = ()
    papers: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The name, without its ending, of the lesson's source and notebook files."""
        return f"{self.id}_{self.name}"


PAPERS = (
    Paper("transformer", 2017, "Attention Is All You Need", "1706.03762", "attention itself"),
    Paper(
        "online-softmax",
        2018,
        "Online normalizer calculation for softmax",
        "1805.02867",
        "maximum and sum in a single pass",
        ("transformer",),
    ),
    Paper(
        "memory-efficient",
        2021,
        "Self-attention does not need O(n²) memory",
        "2112.05682",
        "attention without the S × S matrix",
        ("online-softmax",),
    ),
    Paper(
        "flash",
        2022,
        "FlashAttention",
        "2205.14135",
        "tiles that fit on chip, and their backward",
        ("memory-efficient",),
    ),
    Paper(
        "blockwise",
        2023,
        "Blockwise Parallel Transformer",
        "2305.19370",
        "the feed-forward layer in blocks too",
        ("memory-efficient",),
    ),
    Paper(
        "ring",
        2023,
        "Ring Attention",
        "2310.01889",
        "blocks on many devices, K/V in a ring",
        ("blockwise", "flash"),
    ),
    Paper("striped", 2023, "Striped Attention", "2311.09431", "causal work shared out evenly", ("ring",)),
    Paper(
        "ulysses",
        2023,
        "DeepSpeed Ulysses",
        "2309.14509",
        "exchanges tokens for heads by all-to-all",
        ("transformer",),
    ),
    Paper(
        "zigzag",
        2024,
        "The Llama 3 Herd of Models",
        "2407.21783",
        "an early and a late chunk for each rank",
        ("ring",),
    ),
    Paper("decode", 2024, "Tree Attention", "2408.04093", "one query, a KV cache on many devices", ("ring",)),
)

LESSONS = (
    Lesson(
        "00",
        "start_here",
        "Start here",
        PARTS[0],
        30,
        "run, check and submit an exercise; read the axis legend",
    ),
    Lesson(
        "01",
        "naive_attention",
        "Naive attention and the S² wall",
        PARTS[0],
        60,
        "write attention in NumPy and say which tensor kills memory",
        ("00",),
        ("transformer",),
    ),
    Lesson(
        "02",
        "online_softmax",
        "Online softmax",
        PARTS[0],
        60,
        "derive and write the merge of (out, lse)",
        ("01",),
        ("online-softmax", "memory-efficient"),
    ),
    Lesson(
        "03",
        "tiled_attention",
        "Tiled attention, forward and backward",
        PARTS[0],
        75,
        "write attention with memory linear in S, and its backward",
        ("02",),
        ("flash", "blockwise"),
    ),
    Lesson(
        "05",
        "emulated_ring",
        "The emulated ring",
        PARTS[1],
        60,
        "run ring attention on virtual ranks and say what moves when",
        ("02",),
        ("ring",),
    ),
    Lesson(
        "06",
        "what_it_costs",
        "What it costs",
        PARTS[1],
        70,
        "derive the overlap condition; say what slows a whole ring",
        ("05",),
        ("ring",),
    ),
    Lesson(
        "07",
        "causal_imbalance",
        "The causal imbalance",
        PARTS[1],
        60,
        "mask by global position and show who waits",
        ("05",),
        ("striped",),
    ),
    Lesson(
        "08",
        "striped_and_zigzag",
        "Striped and zig-zag",
        PARTS[1],
        60,
        "build the layouts as one family and measure their balance",
        ("07",),
        ("striped", "zigzag"),
    ),
    Lesson(
        "09",
        "backward_ring",
        "The backward ring",
        PARTS[1],
        75,
        "write it, and say where each gradient is at each step",
        ("03", "05"),
        ("ring",),
    ),
    Lesson(
        "10",
        "numerics",
        "Numerics",
        PARTS[1],
        60,
        "say what must be float32 and why; choose a tolerance",
        ("03", "05", "09"),
    ),
    Lesson(
        "11",
        "real_processes",
        "Real processes",
        PARTS[2],
        60,
        "run the same program under torchrun and avoid deadlock",
        ("05",),
    ),
    Lesson(
        "13",
        "multi_gpu",
        "Multi-GPU ring attention",
        PARTS[2],
        60,
        "launch it on NCCL, read a profile, measure honestly",
        ("06", "11"),
    ),
    Lesson(
        "14",
        "training",
        "Training a model in parallel",
        PARTS[3],
        75,
        "shard a transformer, its positions, loss and gradients",
        ("08", "09"),
        ("zigzag",),
    ),
    Lesson(
        "18",
        "packed_batches",
        "Packed and variable-length batches",
        PARTS[3],
        60,
        "share packed documents over ranks, with the mask, labels, positions and loss of each document alone",
        ("08", "14"),
    ),
    Lesson(
        "15",
        "choosing",
        "Choosing: ring, all-gather, Ulysses, hybrid, decode",
        PARTS[3],
        45,
        "choose for a model and a cluster",
        ("06", "08"),
        ("ulysses", "decode"),
    ),
    Lesson(
        "19",
        "serving",
        "Serving a long context",
        PARTS[3],
        75,
        "say what the users of a server share; prefill in chunks and decode on many ranks",
        ("15",),
    ),
    Lesson(
        "16",
        "bug_clinic",
        "Bug clinic",
        PARTS[3],
        90,
        "diagnose from traces, errors and meters",
        ("09", "10"),
    ),
    Lesson(
        "04",
        "triton_from_zero",
        "Triton from zero",
        PARTS[4],
        75,
        "write and read a Triton kernel, on a CPU",
        ("03",),
        ("flash",),
    ),
    Lesson(
        "12",
        "triton_ring_step",
        "The Triton ring step",
        PARTS[4],
        60,
        "fuse block and merge in one kernel; carry its state between ring steps",
        ("04", "05", "08"),
        ("flash",),
    ),
    Lesson(
        "17",
        "ring_in_jax",
        "The same ring in JAX",
        PARTS[4],
        60,
        "read and write it with shard_map and ppermute; say what autodiff keeps and sends",
        ("08", "09"),
    ),
    Lesson(
        "20",
        "beyond_softmax",
        "Rings beyond softmax",
        PARTS[4],
        75,
        "say what still travels where a state takes the place of keys and values, and scan states over ranks",
        ("09", "14"),
    ),
)

CAPSTONE = Lesson(
    "21",
    "capstone",
    "Capstone: your own ring attention",
    PARTS[3],
    240,
    "hand over a ring attention, forward and backward, in which the conformance suite finds nothing",
    ("05", "08", "09", "10"),
)
"""The exercise without a lesson to which the course leads. It comes after the lessons of all parts but the last."""

COURSE = (
    *(each for each in LESSONS if each.part != PARTS[-1]),
    CAPSTONE,
    *(each for each in LESSONS if each.part == PARTS[-1]),
)
"""The lessons up to the capstone, the capstone, and the further lessons."""

SHORTEST_WAY = ("00", "01", "02", "03", "05", "09")
"""Lesson 09, the backward ring, and all lessons that it needs. With exercise 05 they take at most eight hours."""


def lesson(lesson_id: str) -> Lesson:
    """Return the lesson with the number `lesson_id`, such as "05". Raises: CourseError if there is none."""
    for candidate in LESSONS:
        if candidate.id == lesson_id:
            return candidate
    ids = sorted(each.id for each in LESSONS)
    raise CourseError(f"a lesson from {ids[0]} to {ids[-1]}", repr(lesson_id))
