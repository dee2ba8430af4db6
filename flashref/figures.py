"""`python -m flashref figures`: draw every picture of figures/ again, byte for byte the same.

Same bytes on the same machine with the same matplotlib and fonts; elsewhere the same picture.
"""

import argparse
import functools
import os
from pathlib import Path

import numpy as np

import flashref
from flashref.cuda import results


def pictures():
    """Return file name to what draws it; here matplotlib is imported, which `--help` can spare."""
    plots = flashref.plots
    return {
        "flash1_beside_flash2.png": flash1_beside_flash2,
        "memory_hierarchy.png": plots.memory_pyramid,
        "roofline.png": plots.roofline,
        "backward_recompute.png": plots.backward_recompute,
        "block_sparse_patterns.png": plots.block_patterns,
        "tiling_flash1.png": functools.partial(plots.tiling, "fa1"),
        "tiling_flash2.png": functools.partial(plots.tiling, "fa2"),
        "flash3_timeline.png": plots.timeline_kinds,
        "traffic_by_block.png": plots.traffic_by_block,
        "gpu_ladder.png": lambda: plots.ladder(results.stored()),
        "gpu_lengths.png": lambda: plots.gpu_lengths(results.stored()),
        "gpu_steps.png": lambda: plots.hopper_steps(results.stored()),
        "gpu_timeline.png": lambda: plots.hopper_timeline(results.stored()),
    }


def flash1_beside_flash2():
    """Draw the running example of the lessons after its third tile, both loop orders at once."""
    Q = np.array([[2, 2, 2, 2], [2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 2]])
    K = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 2, 3, 4]])
    V = np.array([[1, 2], [3, 4], [5, 6], [7, 8]])
    return flashref.plots.tile_compare(Q, K, V, step=3)


def main(argv=None):
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m flashref figures", description=__doc__)
    parser.add_argument("--folder", default="figures", help="where to put them (default: figures)")
    folder = Path(parser.parse_args(argv).folder)
    drawn = pictures()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder {folder}: {error.strerror}")
    if not os.access(folder, os.W_OK):
        parser.error(f"--folder {folder} may not be written")
    for name, draw in drawn.items():
        picture = draw()
        picture.save(folder / name)
        print(f"{folder / name}: {picture.alt}")
    return 0
