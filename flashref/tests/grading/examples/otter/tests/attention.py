"""Otter's test of the question "attention": worth 2 points, the report shown when it fails."""

from otter.test_files import test_case

from flashref import check

OK_FORMAT = False
name = "attention"
points = 2


@test_case(points=2)
def test_attention(attention):
    check.attention(attention).raise_if_failed()
