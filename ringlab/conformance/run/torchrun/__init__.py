"""`ringlab check` under torchrun: the processes that torchrun started are the ranks; rank 0 plans, judges and reports.

None of them runs the target itself. Each keeps a child process for that, which has this rank's GPU, and joins the process
group. There are two reasons. torchrun ends all ranks as soon as one of its own processes ends with an error, before
anything is reported. And a process group in which a call has failed, or hangs, cannot be used again. Here such a call costs
the children only: all of them are ended, and new ones, in a new group, make the next run.

A run on fewer ranks than torchrun started has children of the first ranks alone. Its default group is the group of these,
so a target need not take a group to be asked about every number of ranks.

The processes of torchrun belong to no process group. Runs and results travel through torchrun's key-value store, where they
cannot meet the target's own collectives, and where every wait has an end.
"""
