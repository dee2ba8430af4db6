"""Otter's test of the question "softmax": worth 1 point."""

from otter.test_files import test_case

from flashref import check

OK_FORMAT = False
name = "softmax"
points = 1


@test_case(points=1)
def test_softmax(softmax):
    check.softmax(softmax).raise_if_failed()
