"""Static pictures for the lessons, drawn from what the algorithms return.

Each function returns a `Picture`: a matplotlib figure with the words for those who cannot see it.
Needs matplotlib.
"""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(
        "flashref.plots needs matplotlib, which is not installed: python -m pip install matplotlib"
    ) from error

from flashref.plots.picture import Picture
from flashref.plots.softmax import (
    describe_steps,
    exp_overflow,
    exp_range,
    merge_tree,
    shift_zones,
    softmax_shift,
    softmax_steps,
)
from flashref.plots.traffic import traffic_by_block

__all__ = [
    "Picture",
    "describe_steps",
    "exp_overflow",
    "exp_range",
    "merge_tree",
    "shift_zones",
    "softmax_shift",
    "softmax_steps",
    "traffic_by_block",
]
