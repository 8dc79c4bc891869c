"""The exercises, a folder each: a notebook with its solution, checks, hints, misconceptions, example answers."""
