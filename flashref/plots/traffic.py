"""Lessons 00 and 05: what travels between slow and fast memory, counted and foretold."""

import numpy as np
from matplotlib.figure import Figure

from flashref import io_model
from flashref.flash1 import flash_attention_1
from flashref.flash2 import flash_attention_2
from flashref.memory import Memory
from flashref.plots.picture import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PAGE_WIDTH,
    PIXELS_PER_INCH,
    Picture,
    styled,
)  # fmt: skip


@styled
def traffic_by_block(n=1024, d=64, blocks=(16, 32, 64, 128, 256, 512, 1024)):
    """Draw how much each algorithm moves, counted by running it, against the size of its tiles.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    blocks : sequence of int
        Square tiles to run.

    Returns
    -------
    picture : Picture
        Markers are what `Memory` counted, lines the closed forms of `io_model`.
    """
    q, k, v = np.random.default_rng(0).standard_normal((3, n, d))
    curves = {
        "FlashAttention-1": (flash_attention_1, io_model.fa1_traffic, ORANGE, "--", "s"),
        "FlashAttention-2": (flash_attention_2, io_model.fa2_traffic, BLUE, "-", "o"),
    }
    figure = Figure(figsize=(PAGE_WIDTH / PIXELS_PER_INCH, 3.6), layout="constrained")
    axes = figure.subplots()
    whole = sum(io_model.standard_traffic(n, n, d, d))
    least = 4 * n * d
    axes.axhline(whole, color=INK, linewidth=1.8)
    axes.axhline(least, color=GREY, linewidth=1.2, linestyle=":")
    words = []
    for name, (algorithm, closed_form, color, dash, marker) in curves.items():
        counted = []
        for block in blocks:
            hbm = Memory()
            algorithm(q, k, v, block_q=block, block_k=block, memory=hbm)
            counted.append(hbm.loads + hbm.stores)
        fine = np.unique(np.geomspace(blocks[0], blocks[-1], 200).astype(int))
        line = [sum(closed_form(n, n, d, d, block_q=int(b), block_k=int(b))) for b in fine]
        axes.plot(fine, line, color=color, linestyle=dash, linewidth=1.6)
        axes.plot(blocks, counted, marker, color=color, markersize=7, markeredgecolor="white")
        place, shift, side = (0, (14, 3), "left") if marker == "s" else (2, (-8, -15), "right")
        axes.annotate(
            name, (blocks[place], counted[place]), xytext=shift, textcoords="offset points",
            color=color, fontweight="bold", ha=side,
        )  # fmt: skip
        words.append(f"{name} {counted[0] / 1e6:.1f} down to {counted[-1] / 1e6:.2f} million")
    axes.text(blocks[-1], whole, "standard attention", ha="right", va="bottom")
    axes.text(blocks[0], least, "reading Q, K, V and writing O once", va="bottom", color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(blocks, [str(block) for block in blocks])
    axes.set(
        xlabel="rows and columns of a tile, $B_r = B_c$", ylabel="elements moved",
        title=f"Larger tiles move less: N = {n}, d = {d}, one head, forward",
    )  # fmt: skip
    alt = (
        f"Elements moved between slow and fast memory against tile size, N = {n}, d = {d}. "
        f"Standard attention moves {whole / 1e6:.2f} million whatever the tile; "
        f"{' and '.join(words)} as tiles grow from {blocks[0]} to {blocks[-1]}. "
        f"Counted markers lie on the closed form's lines."
    )
    return Picture(figure, alt)
