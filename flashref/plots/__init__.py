"""Static pictures for the lessons, drawn from what the algorithms return.

Each function returns a `Picture`: a matplotlib figure with the words for those who cannot see it.
Needs matplotlib.
"""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "flashref.plots needs matplotlib, which is not installed: python -m pip install matplotlib",
        name=error.name,
    ) from error

from flashref.plots.backward import (
    backward_recompute,
    keep_masks,
    saved_elements,
    saved_memory,
)
from flashref.plots.flash import (
    busy_processors,
    cut_into_blocks,
    slow_work,
    warp_split,
    work_on_output,
)
from flashref.plots.gpu import (
    bank_rows,
    clocks_per_tile,
    coalescing,
    gpu_lengths,
    gpu_roofline,
    hopper_steps,
    hopper_timeline,
    ladder,
    lines_touched,
    measured_tasks,
    rung_intensities,
    swizzle,
    swizzle_places,
    tile_owners,
)
from flashref.plots.machines import (
    attention_intensities,
    basic_intensities,
    in_float32,
    memory_pyramid,
    relative_times,
    roofline,
)
from flashref.plots.masks import block_patterns, mask_tiles, tile_mass, traffic_by_s
from flashref.plots.picture import Picture
from flashref.plots.pipeline import fp8_errors, fp8_line, timeline, timeline_kinds
from flashref.plots.softmax import (
    describe_steps,
    exp_overflow,
    exp_range,
    merge_tree,
    shift_zones,
    softmax_shift,
    softmax_steps,
)
from flashref.plots.standard import (
    difference_curve,
    gradient_graph,
    heat_maps,
    kernel_strip,
    softmax_jacobian,
    softmax_votes,
)
from flashref.plots.tiles import TileStep, tile_compare, tile_steps, tile_trace, tiling
from flashref.plots.traffic import block_size_curves, traffic_by_block, traffic_by_memory

__all__ = [
    "Picture",
    "TileStep",
    "attention_intensities",
    "backward_recompute",
    "bank_rows",
    "basic_intensities",
    "block_patterns",
    "block_size_curves",
    "busy_processors",
    "clocks_per_tile",
    "coalescing",
    "cut_into_blocks",
    "describe_steps",
    "difference_curve",
    "exp_overflow",
    "exp_range",
    "fp8_errors",
    "fp8_line",
    "gpu_lengths",
    "gpu_roofline",
    "gradient_graph",
    "heat_maps",
    "hopper_steps",
    "hopper_timeline",
    "in_float32",
    "keep_masks",
    "kernel_strip",
    "ladder",
    "lines_touched",
    "mask_tiles",
    "measured_tasks",
    "memory_pyramid",
    "merge_tree",
    "relative_times",
    "roofline",
    "rung_intensities",
    "saved_elements",
    "saved_memory",
    "shift_zones",
    "slow_work",
    "softmax_jacobian",
    "softmax_shift",
    "softmax_steps",
    "softmax_votes",
    "swizzle",
    "swizzle_places",
    "tile_compare",
    "tile_mass",
    "tile_owners",
    "tile_steps",
    "tile_trace",
    "tiling",
    "timeline",
    "timeline_kinds",
    "traffic_by_block",
    "traffic_by_memory",
    "traffic_by_s",
    "warp_split",
    "work_on_output",
]
