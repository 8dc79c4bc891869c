"""The functions that lessons and exercises call, and the learner's own progress."""
