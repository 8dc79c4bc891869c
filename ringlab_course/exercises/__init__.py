"""The exercises, one folder each: notebook with its solution, checks, hints, misconceptions and answers."""
