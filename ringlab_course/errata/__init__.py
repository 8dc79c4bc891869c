"""Published claims about ring attention that are wrong, each with the computation that shows it.

`python -m ringlab_course.errata docs/errata.md` writes the page; with `--check` it only prints the
differences.
"""
