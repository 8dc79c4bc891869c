"""Tests that only `make test-all` and CI run, each with a shorter guard of the same behaviour.

A key is the beginning of a test's name, as pytest prints it. Its value names the file or test that still guards the
behaviour in `make test`. If no test does, the value is "only here" and the reason why a user can do without.

Most of these tests start real processes: ranks, kernels, sandboxed workers, browsers. Each process imports
torch, which takes longer than all that it then computes. The others check rules for contributors. They give
the same result on every machine, so that it is enough if CI runs them.
"""

from __future__ import annotations

AUTHORS = "only here: it is about this repository's own files, which are the same on every machine"
ANSWERS = (
    "tests/course/test_submissions.py::test_a_wrong_submission: a part of the same answers, in this process"
)
WRONG = "only here: it holds a test to wrong code, which tells nothing about a user's machine"
CHECKS = (
    "tests/course/test_submissions.py: the same checks on a part of the wrong answers and on the solution"
)
VIRTUAL = (
    "tests/substrates/test_plain_ring.py::test_processes[gloo-2]; "
    "notebooks/11_real_processes.ipynb and others start processes"
)
TABLE = "tests/substrates/test_case_table.py::test_virtual_ranks on a part of the other layouts"
BITS = "tests/substrates/test_case_table.py::test_both_schedules_give_the_same_bits_forward[native]"
PLAIN = "tests/substrates/test_plain_ring.py::test_virtual_ranks on a part of the other layouts"
ISOLATED = "tests/conformance/test_faults.py::test_a_signal_is_named"
TORCHRUN = (
    "only here: torchrun and two processes a rank take long to start; the other tests in this file start none"
)
PEERS = "only here: they try out other packages of ring attention, not ringlab"
STEPS = "tests/conformance/test_stepping.py::test_the_plain_step_passes: the same checks on virtual ranks"
SKIPS = "only here: they start pytest, and are about what CI may skip"
THOROUGH = {
    "solutions/": "tests/course/test_submissions.py::test_the_solution_passes_every_tier runs their graded cells",
    "tests/bench/": "only here: it is about measuring, which contributors do; notebooks/13_multi_gpu.ipynb reads results",
    "tests/blocks/test_kernel_mutants.py": WRONG,
    "tests/blocks/test_offline.py": "tests/blocks/test_interpreter.py runs the same kernels on this CPU",
    "tests/blocks/test_shipped_kernels.py": "tests/blocks/test_interpreter.py runs the same kernels on this CPU",
    "tests/browser/": "only here: nbval runs the same lessons without a browser",
    "tests/cli/test_cli.py::test_doctor_says_what_is_broken": "tests/cli/test_cli.py::test_doctor_prints_one_object",
    "tests/cli/test_cli.py::test_doctor_tells_of_every": "tests/cli/test_cli.py::test_doctor_prints_one_object",
    "tests/cli/test_cli.py::test_doctor_tries": "tests/cli/test_cli.py::test_doctor_prints_one_object",
    "tests/cli/test_train.py::test_torchrun": "tests/cli/test_train.py::test_it_goes_on: the same on virtual ranks",
    "tests/conformance/test_evidence.py::test_a_row": "tests/conformance/test_report.py::test_the_command_writes",
    "tests/conformance/test_faults.py::test_a_process": ISOLATED,
    "tests/conformance/test_faults.py::test_each": ISOLATED,
    "tests/conformance/test_faults.py::test_who_ends": "tests/conformance/test_faults.py::test_whatever_is_returned",
    "tests/conformance/test_faults.py::test_who_never": "tests/conformance/test_faults.py::test_whatever_is_returned",
    "tests/conformance/test_isolation.py::test_a_run": f"only here: some wait for their limit; crashes: {ISOLATED}",
    "tests/conformance/test_isolation.py::test_a_target": "only here: it waits for its limit",
    "tests/conformance/test_isolation.py::test_an_import": "only here: it waits for its limit",
    "tests/conformance/test_isolation.py::test_nonsense_is_named[int": ISOLATED,
    "tests/conformance/test_isolation.py::test_nonsense_is_named[lea": ISOLATED,
    "tests/conformance/test_isolation.py::test_what_cannot": "tests/conformance/test_target.py::test_a_reference_names",
    "tests/conformance/test_isolation.py::test_while": "only here: it waits, and a machine seldom stands still",
    "tests/conformance/test_html.py::test_the_first_sentence": "tests/conformance/test_html.py::test_a_page_stands_alone",
    "tests/conformance/test_script.py::test_a_right": "tests/conformance/test_script.py::test_the_script_makes_the_same_run",
    "tests/conformance/test_script.py::test_a_wrong_ring": "tests/conformance/test_script.py::test_the_script_makes_the_same_run",
    "tests/conformance/test_mutants.py": "tests/conformance/test_report.py::test_the_command_writes finds one wrong ring of them",
    "tests/conformance/test_peers.py::test_dq_rounded": PEERS,
    "tests/conformance/test_peers.py::test_torchs": PEERS,
    "tests/conformance/test_peers.py::test_wrong_gradients": PEERS,
    "tests/conformance/test_report.py::test_the_exit_status": "tests/conformance/test_report.py::test_the_command_writes",
    "tests/conformance/test_report.py::test_the_plugin": "tests/conformance/test_report.py::test_the_command_writes",
    "tests/conformance/test_decoding.py::test_a_decode_over": STEPS,
    "tests/conformance/test_decoding.py::test_right": "tests/conformance/test_decoding.py::test_a_check_without: a right decode",
    "tests/conformance/test_stepping.py::test_a_hang": STEPS,
    "tests/conformance/test_stepping.py::test_a_model": "tests/conformance/test_stepping.py::test_the_plain_step_passes",
    "tests/conformance/test_stepping.py::test_a_step_over": STEPS,
    "tests/conformance/test_stepping.py::test_a_step_that_demands": "tests/conformance/test_stepping.py::test_the_plain_step_passes",
    "tests/conformance/test_stepping.py::test_a_wrong": WRONG,
    "tests/conformance/test_stepping.py::test_the_rank": STEPS,
    "tests/conformance/test_torchrun.py::test_a_merge": TORCHRUN,
    "tests/conformance/test_torchrun.py::test_a_ri": TORCHRUN,
    "tests/conformance/test_torchrun.py::test_a_wrong": TORCHRUN,
    "tests/conformance/test_torchrun.py::test_each": TORCHRUN,
    "tests/conformance/test_torchrun.py::test_every": TORCHRUN,
    "tests/conformance/test_torchrun.py::test_what": TORCHRUN,
    "tests/conformance/test_styles.py::test_a_style": "tests/conformance/test_report.py::test_the_command_writes",
    "tests/conformance/test_styles.py::test_a_fault": WRONG,
    "tests/conformance/test_call_patterns.py::test_a_target_with": "tests/conformance/test_call_patterns.py::test_axes_there_and_back",
    "tests/conformance/test_call_patterns.py::test_a_wrong_run": "only here: it saves time, and changes no verdict",
    "tests/conformance/test_call_patterns.py::test_an_allowed": "tests/conformance/test_report.py::test_the_command_writes",
    "tests/conformance/test_call_patterns.py::test_a_group": "tests/conformance/test_call_patterns.py::test_ringlabs_own_ring: two rings over ringlab's Comm",
    "tests/cost/test_closed_form.py": "tests/cost/test_traffic.py",
    "tests/cost/test_memory.py::test_a_forgotten": WRONG,
    "tests/cost/test_pipeline.py::test_the_schedule": WRONG,
    "tests/cost/test_published.py::test_a_mistake": WRONG,
    "tests/cost/test_published.py::test_its_command": "tests/cost/test_published.py::test_every_published: the same figures",
    "tests/cost/test_planner_laws.py": "tests/cost/test_planner.py",
    "tests/cost/test_planner_mutants.py::test_a_mistake": WRONG,
    "tests/cost/test_planner_mutants.py::test_every_check": WRONG,
    "tests/cost/test_simulate.py::test_its_messages_under": "tests/cost/test_simulate.py::test_its_messages_are",
    "tests/course/bench/": "only here: it is about measuring, which contributors do",
    "tests/course/figures/": "only here: the notebooks draw these pictures, and make test runs them",
    "tests/course/gradebook/test_cluster.py": "only here: Dask clusters, an extra",
    "tests/course/gradebook/test_hostile_class.py": "tests/course/judge/test_hostile.py::test_those_that_leave_each_other",
    "tests/course/gradebook/test_killed.py": "tests/course/gradebook/test_store.py: a book is whole after every write",
    "tests/course/gradebook/test_pages.py": "only here: tests/course/gradebook/test_runner.py tries the runs, not the pages",
    "tests/course/gradebook/test_pages_in_browser.py": "only here: tests/course/gradebook/test_runner.py tries the runs, not the pages",
    "tests/course/judge/test_allowance.py::test_a_tier": "tests/course/judge/test_allowance.py::test_patience",
    "tests/course/judge/test_hostile.py::test_hostile": "tests/course/judge/test_hostile.py::test_those_that_leave_each_other",
    "tests/course/judge/test_hostile.py::test_a_file_earns": "tests/course/judge/test_loader.py",
    "tests/course/judge/test_hostile_rings.py": "tests/course/judge/test_network.py",
    "tests/course/judge/test_watch.py::test_what_is_changed": "tests/course/judge/test_network.py",
    "tests/course/judge/test_watch.py::test_computing": "tests/course/judge/test_faults.py::test_computing_that_is",
    "tests/course/lab/test_labs.py": "tests/course/lab/test_contest.py and tests/course/lab/test_preflight.py",
    "tests/course/nbgrader/test_end_to_end.py": "tests/course/nbgrader/test_submitted.py grades a notebook",
    "tests/course/test_builder.py": AUTHORS,
    "tests/course/test_errata.py": AUTHORS,
    "tests/course/test_exercise_06.py": CHECKS,
    "tests/course/test_exercise_07.py": CHECKS,
    "tests/course/test_exercise_08.py": CHECKS,
    "tests/course/test_exercise_09.py": CHECKS,
    "tests/course/test_exercise_11.py": CHECKS,
    "tests/course/test_exercise_12.py": CHECKS,
    "tests/course/test_exercise_13.py": CHECKS,
    "tests/course/test_exercise_14.py": CHECKS,
    "tests/course/test_exercise_15.py": CHECKS,
    "tests/course/test_exercise_16.py": CHECKS,
    "tests/course/test_exercise_17.py": CHECKS,
    "tests/course/test_exercise_17_bfloat16.py": CHECKS,
    "tests/course/test_exercise_21.py": CHECKS,
    "tests/course/test_extras_needed.py::test_its_notebook": "only here: it starts pytest twice; learners do not run pytest",
    "tests/course/test_kill_matrix.py": AUTHORS,
    "tests/course/test_lesson_04.py": "notebooks/04_triton_from_zero.ipynb: the same kernels in the interpreter",
    "tests/course/test_lesson_17.py": "notebooks/17_ring_in_jax.ipynb",
    "tests/course/test_nonsense.py": ANSWERS,
    "tests/course/test_seeds.py::test_on_twenty": "tests/course/test_submissions.py: on one draw",
    "tests/course/test_seeds.py::test_the_judge": ANSWERS,
    "tests/course/test_submissions.py::test_a_right": "tests/course/test_submissions.py::test_the_solution",
    "tests/course/test_unearned.py": AUTHORS,
    "tests/floors/test_direction.py": AUTHORS,
    "tests/floors/test_house_rules.py": AUTHORS,
    "tests/floors/test_shape_checks.py": AUTHORS,
    "tests/fuzz/": "tests/course/judge/test_protocol.py and tests/course/judge/test_loader.py",
    "tests/hf/test_every_family.py::test_every_family": "tests/hf/test_every_family.py::test_a_family, on a part of the families",
    "tests/hf/test_step.py::test_a_wrong": WRONG,
    "tests/hf/test_step.py::test_the_script": "tests/hf/test_step.py::test_float32_is_as_exact_as_one_process",
    "tests/hf/test_step.py::test_the_trainer": "only here: transformers' Trainer and seven processes take long to start",
    "tests/journey/": "tests/packaging/test_readme.py runs the tour",
    "tests/laws/test_block_laws.py::test_the_law_notices": WRONG,
    "tests/nn/test_loss.py::test_the_law_notices": WRONG,
    "tests/nn/test_mesh.py": "tests/nn/test_attention.py on virtual ranks",
    "tests/nn/test_precision.py::test_processes": "notebooks/14_training.ipynb: processes and virtual ranks",
    "tests/nn/test_precision.py::test_ddp": "only here: it is about torch's own DistributedDataParallel",
    "tests/nn/test_schedule_and_clipping.py::test_the_law_notices": WRONG,
    "tests/nn/test_training.py::test_a_wrong": WRONG,
    "tests/nn/test_training.py::test_the_example": "notebooks/14_training.ipynb",
    "tests/packaging/test_declared.py": AUTHORS,
    "tests/packaging/test_docs.py": AUTHORS,
    "tests/packaging/test_drift.py": AUTHORS,
    "tests/packaging/test_wheel.py": AUTHORS,
    "tests/packaging/test_gpu_check.py::test_nothing": "only here: it is about machines with a GPU and few packages",
    "tests/packaging/test_guide.py::test_a_program": "tests/packaging/test_readme.py",
    "tests/packaging/test_guide.py::test_the_script": "notebooks/11_real_processes.ipynb",
    "tests/packaging/test_instructors.py": "tests/course/gradebook/test_runner.py: each command of the manual by itself",
    "tests/packaging/test_lean_install.py": (
        "only here: it builds a wheel and installs it; "
        "tests/course/test_extras_needed.py::test_the_command looks at the text"
    ),
    "tests/packaging/test_required.py::test_a_machine_without": SKIPS,
    "tests/packaging/test_required.py::test_no_skip": SKIPS,
    "tests/packaging/test_required.py::test_what_may": SKIPS,
    "tests/packaging/test_required.py::test_where_all": SKIPS,
    "tests/packing/test_assign.py::test_the_law": WRONG,
    "tests/packing/test_groups.py::test_processes": "tests/packing/test_groups.py::test_a_step_is_that_of_one_process on threads",
    "tests/packing/test_training.py::test_the_law": WRONG,
    "tests/schedules/test_decode.py::test_the_oracle_notices": WRONG,
    "tests/schedules/test_exact.py::test_the_oracle_notices": WRONG,
    "tests/schedules/test_mesh.py::test_refusals": "tests/schedules/test_exact.py on virtual ranks",
    "tests/schedules/test_mesh.py::test_rows": "tests/schedules/test_exact.py on virtual ranks",
    "tests/serving/test_case_table.py::test_processes_have_the_same_bits_and_messages[s": VIRTUAL,
    "tests/serving/test_decode_heads.py::test_the_oracle_notices": WRONG,
    "tests/serving/test_prefill.py::test_the_oracle_notices": WRONG,
    "tests/site/": "only here: `make test` builds no site; tests/course/test_lint.py looks at the sources of its pages",
    "tests/substrates/test_case_table.py::test_both_schedules_give_the_same_bits_forward[b": BITS,
    "tests/substrates/test_case_table.py::test_both_schedules_give_the_same_bits_forward[naive]": BITS,
    "tests/substrates/test_case_table.py::test_processes": VIRTUAL,
    "tests/substrates/test_case_table.py::test_virtual_ranks[chunk": TABLE,
    "tests/substrates/test_case_table.py::test_virtual_ranks[per-document": TABLE,
    "tests/substrates/test_case_table.py::test_virtual_ranks[token-fold": TABLE,
    "tests/substrates/test_case_table_triton.py": "tests/blocks/test_triton_kernels.py",
    "tests/substrates/test_distributed.py::test_torchrun": VIRTUAL,
    "tests/substrates/test_faulty.py::test_distributed": "tests/substrates/test_faulty.py: the same faults on virtual ranks",
    "tests/substrates/test_launch.py::test_a_": "tests/substrates/test_launch.py::test_the_first_failure",
    "tests/substrates/test_launch.py::test_functions_of_cells": "notebooks/11_real_processes.ipynb",
    "tests/substrates/test_plain_ring.py::test_processes[gloo-3]": VIRTUAL,
    "tests/substrates/test_plain_ring.py::test_processes[s": VIRTUAL,
    "tests/substrates/test_plain_ring.py::test_virtual_ranks[per-document": PLAIN,
    "tests/substrates/test_transports.py": VIRTUAL,
    "tests/test_attention_masks.py::test_processes": VIRTUAL,
    "tests/test_attention_non_finite.py::test_what": "tests/test_attention_non_finite.py::test_a_poison",
    "tests/test_attention_refuses.py::test_processes": VIRTUAL,
    "tests/trainer/test_compile.py": "tests/trainer/test_modes.py::test_a_way_of_calling_changes_no_bit without torch.compile",
    "tests/trainer/test_groups.py": "tests/trainer/test_modes.py::test_micro_batches_in_flight on virtual ranks",
    "tests/trainer/test_sdpa.py::test_the_script": "tests/trainer/test_sdpa.py::test_it_is_torchs_own",
    "tests/viz/": "only here: the notebooks draw these pictures, and make test runs them",
}  # fmt: skip


def entry_of(nodeid: str) -> str | None:
    """Return the entry that lists a thorough test; None for a test that `make test` runs."""
    return next((start for start in THOROUGH if nodeid.startswith(start)), None)


def guard_of(nodeid: str) -> str | None:
    """Return what guards a thorough test's behaviour in `make test`; None for a test that `make test` runs."""
    entry = entry_of(nodeid)
    return None if entry is None else THOROUGH[entry]
