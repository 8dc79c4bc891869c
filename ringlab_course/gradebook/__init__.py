"""A class's grades: collecting submissions, grading them, storing the results, and writing pages.

collect    finds the submissions below paths, whatever the folders contain
policy     deadlines, and the points that a late submission loses
versions   the inputs of a result: the version of the checks, the seed, the notebook
pool       grades in processes of this machine; `cluster` grades on a Dask cluster
runner     grades a class into its gradebook, and can be repeated until no result is missing
entry      the gradebook's record of one learner in one exercise
schema     the tables, their versions, and how a file is recognised as a gradebook
store      the gradebook itself: one transaction per result, one writer at a time
export     CSV and JSON for other programs
readable   numbers, names and entries as safe text; `formulas` turns formulas into pictures
pages      the grades as web pages; `class_view` and `learner_view` are their content, `plots` their pictures
"""
