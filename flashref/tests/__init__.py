"""The tests of flashref, installed with it: `pytest --pyargs flashref`."""
