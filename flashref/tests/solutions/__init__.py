"""Model solutions of the lessons' exercises, for `test_solutions.py`. Learners: try first."""
