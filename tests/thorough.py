"""Tests that only `make test-all` and CI run: long, and each beside a shorter test of the same thing.

A key is the beginning of a test's name, as pytest prints it; its value names what still guards the same
behaviour in `make test`.
"""

from __future__ import annotations

THOROUGH = {
    "tests/bench/test_calibrate.py": "tests/cost/test_hardware.py reads the files that it writes",
    "tests/bench/test_lanes.py": "notebooks/13_multi_gpu.ipynb draws lanes of a recorded profile",
    "tests/bench/test_peers.py": "tests/conformance/test_peers.py runs each peer on one case",
    "tests/blocks/test_kernel_mutants.py": "tests/blocks/test_triton_kernels.py holds the kernels to the oracle",
    "tests/blocks/test_offline.py": "tests/blocks/test_interpreter.py runs the same kernels on this CPU",
    "tests/blocks/test_shipped_kernels.py": "tests/blocks/test_interpreter.py runs the same kernels on this CPU",
    "tests/browser/": "the notebooks run in nbval; tests/viz hold their figures and widgets",
    "tests/conformance/test_isolation.py": "tests/conformance/test_mutants.py finds every wrong ring",
    "tests/conformance/test_mutants.py::test_our_ring_passes_on_processes": "test_our_ring_passes_on_virtual_ranks",
    "tests/conformance/test_mutants.py::test_our_ring_passes_on_virtual_ranks[blockwise]": "the cases of ring and naive",
    "tests/conformance/test_mutants.py::test_our_ring_passes_on_virtual_ranks[allgather]": "the cases of ring and naive",
    "tests/course/gradebook/test_killed.py": "tests/course/gradebook/test_store.py: a book is whole after every write",
    "tests/course/nbgrader/test_end_to_end.py": "tests/course/nbgrader/test_submitted.py grades a notebook",
    "tests/course/test_kill_matrix.py": "tests/course/test_submissions.py: each wrong answer falls to its check",
    "tests/course/test_exercise_08.py::test_two_pieces_of_every_document_keep_within_what_is_asked":
        "the sweep of exercise 08's right and wrong answers",
    "tests/fuzz/": "tests/course/judge/test_protocol.py and test_submission_bounds.py: damaged input by kind",
    "tests/journey/": "tests/packaging/test_readme.py runs the tour",
    "tests/packaging/test_instructors.py": "tests/course/gradebook: each command of the manual by itself",
    "tests/course/lab/test_labs.py": "tests/course/lab/test_contest.py and test_preflight.py: each part of a lab by itself",
    "tests/site/": "tests/course/test_lint.py and nbval: what the pages are made of",
    "tests/substrates/test_case_table_triton.py": "tests/blocks/test_triton_kernels.py",
    "tests/substrates/test_scores_triton.py": "tests/blocks/test_triton_kernels.py",
    "tests/substrates/test_transports.py::test_every_survivor_of_a_kill_names_the_dead_rank":
        "tests/substrates/test_faulty.py kills ranks over gloo",
}  # fmt: skip


def guard_of(nodeid: str) -> str | None:
    """Return what guards a thorough test's behaviour in `make test`; None for a test that `make test` runs."""
    return next((guard for start, guard in THOROUGH.items() if nodeid.startswith(start)), None)
