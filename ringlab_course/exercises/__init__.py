"""The exercises. Each folder has a notebook with its solution, checks, hints, misconceptions and answers."""
