"""The commands of the course: lab, build, exercise, grade, gradebook, nbgrader, progress."""
