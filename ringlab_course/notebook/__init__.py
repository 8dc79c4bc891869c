"""The functions that lessons and exercises call, and the file with the learner's own progress."""
