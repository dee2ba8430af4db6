"""Lessons 09 and 10: any mask, any blocks; which tiles are left, and what that saves."""

from ipywidgets import Dropdown, IntSlider

from flashref import block_sparse, plots
from flashref.inputs import count, require
from flashref.plots.masks import MOST
from flashref.widgets.explorer import Explorer, labelled

PATTERNS = {  # what the picker calls them, and the controls that apply
    "none": ("no mask", ()),
    "causal": ("causal, bottom-right", ()),
    "top-left": ("causal, top-left", ()),
    "window": ("window", ("left", "right")),
    "local": ("local blocks", ("width",)),
    "strided": ("strided blocks", ("stride",)),
    "butterfly": ("butterfly", ()),
    "global": ("global + window", ("n_global", "width")),
    "random": ("random blocks", ("per_row", "seed")),
}


def mask_explorer(n=64, block=8, pattern="causal", *, d=64):
    """Choose a mask and blocks, and see which tiles are computed, which skipped, and what is saved.

    Parameters
    ----------
    n : int
        Queries and keys at the start, up to 1,024.
    block : int
        Rows and columns of a tile at the start.
    pattern : str
        The mask at the start: none, causal (bottom-right), top-left (causal too), window, local,
        strided, butterfly, global (with a window) or random.
    d : int
        Columns of q, k and v, for the traffic of one head.

    Returns
    -------
    explorer : Explorer
        With the controls pattern, n_q, n_k, block_q, block_k; left and right in keys; width,
        stride, n_global and per_row in blocks; seed. Those that do not apply are hidden.
    """
    n, block = count("n", n), count("block", block)
    require(n <= MOST, f"{n=} must be at most {MOST:,} to be drawn")
    require(pattern in PATTERNS, f"{pattern=} must be one of {', '.join(PATTERNS)}")
    most, most_block = max(n, 256), max(block, 128)
    picker = [(label, value) for value, (label, _) in PATTERNS.items()]
    controls = {
        "pattern": labelled(Dropdown, "mask", 199, options=picker, value=pattern),
        "n_q": _slider("queries", n, 1, most),
        "n_k": _slider("keys", n, 1, most),
        "block_q": _slider("B_r (rows)", block, 1, most_block),
        "block_k": _slider("B_c (cols)", block, 1, most_block),
        "left": _slider("left (keys)", n // 4, 0, most),
        "right": _slider("right (keys)", 0, 0, most),
        "n_global": _slider("global (blocks)", 1, 0, most),
        "width": _slider("width (blocks)", 1, 0, most),
        "stride": _slider("stride (blocks)", 4, 1, most),
        "per_row": _slider("more (blocks)", 2, 0, most),
        "seed": _slider("seed", 0, 0, 99),
    }
    always = set(list(controls)[:5])

    def adjust():
        sides = (("n_q", "block_q"), ("n_k", "block_k"))
        t = max(-(-controls[n].value // controls[b].value) for n, b in sides)
        controls["per_row"].max = t - 1  # a row has no other blocks
        applies = always.union(PATTERNS[controls["pattern"].value][1])
        for name, control in controls.items():
            control.layout.display = None if name in applies else "none"

    def draw(pattern, n_q, n_k, block_q, block_k, **options):
        return plots.mask_tiles(
            n_q, n_k, block_q=block_q, block_k=block_k, d=d, **_mask(pattern, **options)
        )

    return Explorer("mask_explorer", draw, controls, adjust=adjust, height=350)


def _slider(label, value, low, high):
    return labelled(
        IntSlider, label, 199, value=value, min=low, max=high, continuous_update=False
    )  # fmt: skip


def _mask(pattern, *, left, right, n_global, width, stride, per_row, seed):
    """Return what `plots.mask_tiles` is to draw."""
    blocks = {
        "local": (f"Local blocks, ±{width}", lambda t: block_sparse.local_pattern(t, width)),
        "strided": (
            f"Strided, 1 block in {stride}",
            lambda t: block_sparse.strided_pattern(t, stride),
        ),
        "butterfly": ("Butterfly", block_sparse.butterfly_pattern),
        "global": (
            f"Global {n_global}, window ±{width}",
            lambda t: block_sparse.global_window_pattern(t, n_global, width),
        ),
        "random": (
            f"Diagonal and {per_row} random blocks a row",
            lambda t: block_sparse.random_pattern(t, per_row, seed),
        ),
    }
    if pattern in blocks:
        name, make = blocks[pattern]
        return {"name": name, "pattern": make}
    if pattern == "window":
        return {"window": (left, right)}
    return {"causal": {"none": False, "causal": True}.get(pattern, pattern)}
