"""The course as static web pages that load nothing from anywhere: `python -m tools.website`, or `make site`.

stage            the sources of all pages, made from the checkout: nothing of it is committed
notebooks        lessons as they were run, exercises as skeletons
front            the first page: what the course is, and its map
moving_ring      the picture on it, from the trace of a run
misconceptions   every mistake that the checks know by name
kill_matrix      which check finds which wrong answer; check_reasons says what a check that finds none alone is for
api, docstrings  the reference, read from the package's source without importing it
conf             settings of Sphinx
search           what the search shows first, for search_scorer.js
links            every link and anchor of the built pages, and whatever they would load
"""
