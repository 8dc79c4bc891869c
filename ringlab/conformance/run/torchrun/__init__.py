"""`ringlab check` under torchrun: torchrun's processes are the ranks; rank 0 plans, judges and reports.

None of these processes runs the target itself. Each keeps a child process for that, which uses this rank's
GPU and joins the process group. There are two reasons. First, torchrun ends all ranks as soon as one of its
own processes ends with an error, before anything is reported. Second, a process group in which a call has
failed or hangs cannot be used again. With children, such a call costs only the children: all of them are
ended, and new children in a new group carry out the next run.

A run on fewer ranks than torchrun started uses children of only the first ranks, which form the run's default
process group. So a target can be tested on every number of ranks even if it has no parameter for a group.

torchrun's processes belong to no process group. Runs and results are sent through torchrun's key-value store,
so they cannot interfere with the target's own collectives, and every wait has a time limit.
"""
