"""The homework command, and the checks inside the graders that courses use."""
