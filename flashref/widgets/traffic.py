"""Lessons 00 and 05: what moves and what fits, for any block size; where attention meets the roof.

Every drawing follows the closed forms of `io_model`; small sizes are also run and counted.
"""

from ipywidgets import Dropdown, IntSlider, SelectionSlider

from flashref import io_model, plots
from flashref.inputs import count, require
from flashref.plots.traffic import ALGORITHMS
from flashref.widgets.explorer import Explorer, labelled

OWN, RULE, SQUARE = "as set below", "the paper's rule", "largest square that fits"


def _elements(machine, size=2):
    return machine.sram_bytes // size


# What each preset sets. A card sets M, the fast memory that one of its cores can give to a program
PRESETS = {
    "own values": {},
    "T4, fp16": {"sram_elements": _elements(io_model.T4)},
    "A100, fp16": {"sram_elements": _elements(io_model.A100)},
    "H100 or H200, fp16": {"sram_elements": _elements(io_model.H100)},
    "a laptop core's 1 MiB L2, fp32": {"sram_elements": 2**20 // 4},
    "FA1's 100 KB, fp16": {"sram_elements": 51_200},
    "FA1 Fig. 2, middle": {
        "algorithm": "FA1 forward", "n": 1024, "d": 64, "sram_elements": 98_304,
        "block_q": 64, "block_k": 256,
    },
}  # fmt: skip
LENGTHS = [2**power for power in range(3, 15)]
WIDTHS = [4, 8, 16, 32, 64, 96, 128, 192, 256]
SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 24_576, 25_600, 65_536, 131_072]
WIDEST = 2048  # of a tile; a longer slider would be too coarse for the mouse


def block_size_explorer(
    n=1024, d=64, sram_elements=51_200, block_q=None, block_k=None, algorithm="FA1 forward"
):
    """Move N, d, M and the tile, and see what moves, what fits, and what finds no room.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    sram_elements : int
        Size M of the fast memory, in elements.
    block_q, block_k : int, optional
        Rows and columns of a tile at the start. Default: the paper's rule, `io_model.block_sizes`.
    algorithm : str
        One of "FA1 forward", "FA2 forward", "FA1 backward", "FA2 backward".

    Returns
    -------
    explorer : Explorer
        With the controls preset, algorithm, blocks, n, d, sram_elements, block_q and block_k.
    """
    n, d = count("n", n), count("d", d)
    require(algorithm in ALGORITHMS, f"{algorithm=} must be one of {', '.join(ALGORITHMS)}")
    rule = io_model.block_sizes(sram_elements, d)
    mode = RULE if block_q is None and block_k is None else OWN
    start = dict(zip(("block_q", "block_k"), rule, strict=True))
    for name, value in (("block_q", block_q), ("block_k", block_k)):
        if value is not None:
            start[name] = count(name, value)
    every_size = SIZES + [p["sram_elements"] for p in PRESETS.values() if p]
    block = dict(min=1, continuous_update=False)
    controls = {
        "preset": labelled(Dropdown, "preset", 330, options=list(PRESETS)),
        "algorithm": labelled(
            Dropdown, "algorithm", 220, options=list(ALGORITHMS), value=algorithm
        ),
        "blocks": labelled(
            Dropdown, "blocks", 240, options=[RULE, SQUARE, OWN], value=mode
        ),
        "n": _choice("N (tokens)", LENGTHS, n),
        "d": _choice("d (numbers per token)", WIDTHS, d),
        "sram_elements": _choice("M (elements)", every_size, sram_elements),
        "block_q": labelled(
            IntSlider, "B_r (queries)", 395, max=max(n, start["block_q"]),
            value=start["block_q"], **block,
        ),
        "block_k": labelled(
            IntSlider, "B_c (keys)", 395, max=max(n, start["block_k"]),
            value=start["block_k"], **block,
        ),
    }  # fmt: skip
    seen = {}  # the values at the last drawing

    def adjust():
        now = {name: control.value for name, control in controls.items()}
        moved = {name for name in now if name in seen and now[name] != seen[name]}
        chosen = PRESETS[now["preset"]]
        if "preset" in moved:
            for name in ("block_q", "block_k"):
                controls[name].max = WIDEST  # or a slider would clip what belongs to a larger N
            for name, value in chosen.items():
                controls[name].value = value
        if moved & {"block_q", "block_k"} or ("preset" in moved and "block_q" in chosen):
            controls["blocks"].value = OWN
        n, d, M = (controls[name].value for name in ("n", "d", "sram_elements"))
        for name in ("block_q", "block_k"):
            controls[name].max = min(n, WIDEST)
        sides = ()
        if controls["blocks"].value == RULE:
            sides = io_model.block_sizes(M, d)
        elif controls["blocks"].value == SQUARE:
            tiles = ALGORITHMS[controls["algorithm"].value].tiles
            sides = (max(1, io_model.fitting_block(M, d, d, tiles)),) * 2
        for name, side in zip(("block_q", "block_k"), sides, strict=False):
            controls[name].value = min(side, controls[name].max)
        if any(controls[name].value != value for name, value in chosen.items()):
            controls["preset"].value = "own values"
        seen.update({name: control.value for name, control in controls.items()})

    def draw(preset, blocks, **values):
        return plots.block_size_curves(**values)

    return Explorer("block_size_explorer", draw, controls, adjust=adjust, height=440)


def roofline_explorer(n=1024, d=64, dtype="fp16", machine="A100 40 GB"):
    """Move N and d, choose the number type and the GPU, and see what limits attention there.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    dtype : str
        "fp16", with tensor cores, or "fp32", without.
    machine : str
        The name of one of `io_model.MACHINES`.

    Returns
    -------
    explorer : Explorer
        With the controls n, d, dtype and machine.
    """
    machines = {m.name: m for m in io_model.MACHINES}
    sizes = {"fp16": 2, "fp32": 4}
    require(machine in machines, f"{machine=} must be one of {', '.join(machines)}")
    require(dtype in sizes, f"{dtype=} must be one of {', '.join(sizes)}")
    controls = {
        "n": _choice("N (tokens)", LENGTHS, count("n", n)),
        "d": _choice("d (numbers per token)", WIDTHS, count("d", d)),
        "dtype": labelled(Dropdown, "number type", 180, options=list(sizes), value=dtype),
        "machine": labelled(Dropdown, "GPU", 200, options=list(machines), value=machine),
    }

    def draw(n, d, dtype, machine):
        chosen = machines[machine]
        points = plots.attention_intensities(n, d, sizes[dtype], chosen)
        return plots.roofline(chosen if dtype == "fp16" else plots.in_float32(chosen), points)

    return Explorer("roofline_explorer", draw, controls, height=365)


def _choice(label, options, value):
    """Return a slider over a few sizes, the given one among them."""
    options = sorted({*options, value})
    named = [(f"{option:,}", option) for option in options]
    return labelled(SelectionSlider, label, 395, options=named, value=value,
                    continuous_update=False)  # fmt: skip
