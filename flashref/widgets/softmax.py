"""Lessons 02 and 03: a constant added to all scores; online softmax block by block."""

import numpy as np
from ipywidgets import Button, Dropdown, IntSlider, Text

from flashref import plots
from flashref.inputs import count, float_array, require
from flashref.widgets.explorer import Explorer, labelled


def softmax_stepper(x=None, v=None, block=2):
    """Step through online softmax block by block: m, l, o and the factor on the old part.

    Parameters
    ----------
    x : sequence of numbers, optional
        Scores of one row. Default: 1, 2, 3, 10 with four value vectors.
    v : float array (n, d_v), optional
        One value vector per score; without it o is left out.
    block : int
        Scores per block at the start.

    Returns
    -------
    explorer : Explorer
        With the controls scores, order, block and step.
    """
    if x is None:
        x = [1, 2, 3, 10]
        v = [[1, 2], [3, 4], [5, 6], [7, 8]] if v is None else v
    x = float_array("x", x)
    require(x.ndim == 1 and len(x) > 0, f"x has shape {x.shape}; give one row of scores, (n,)")
    v = None if v is None else float_array("v", v)
    block = min(count("block", block), len(x))
    scores = ", ".join(f"{s:g}" for s in x)
    controls = {
        "scores": labelled(Text, "scores", 280, value=scores, continuous_update=False),
        "order": labelled(Dropdown, "order", 200, options=["as given", "reversed"]),
        "block": labelled(
            IntSlider,
            "block (scores)",
            280,
            value=block,
            min=1,
            max=len(x),
            continuous_update=False,
        ),
        "step": labelled(
            IntSlider, "step (blocks seen)", 280, value=1, min=0, continuous_update=False
        ),
    }
    back, forth = labelled(Button, "Back", 100), labelled(Button, "Next block", 100)
    step = controls["step"]

    def adjust():
        n = len(_numbers(controls["scores"].value))
        controls["block"].max = n
        step.max = -(-n // controls["block"].value)
        back.disabled, forth.disabled = step.value == step.min, step.value == step.max

    def draw(scores, order, block, step):
        s, values = _numbers(scores), v
        if order == "reversed":
            s, values = s[::-1], None if v is None else v[::-1]
        return plots.softmax_steps(s, values, block, show=[step])

    def move(by):
        step.value = min(max(step.value + by, step.min), step.max)

    back.on_click(lambda button: move(-1))
    forth.on_click(lambda button: move(+1))
    return Explorer(
        "softmax_stepper", draw, controls, adjust=adjust, extra=[back, forth], height=300
    )


def shift_slider(softmax, x=(1, 2, 3)):
    """Slide a constant c added to all scores, and watch where a softmax dies in three types.

    Parameters
    ----------
    softmax : callable
        Softmax of one row, in the type of that row; try your own.
    x : sequence of numbers
        The scores.

    Returns
    -------
    explorer : Explorer
        With the control shift, from -1000 to 1000.
    """
    zones = []  # the same for every c: found once, at the first drawing

    def draw(shift):
        if not zones:
            zones.append(plots.shift_zones(softmax, x))
        return plots.softmax_shift(softmax, x, shift, zones[0])

    slider = labelled(IntSlider, "c", 760, min=-1000, max=1000, continuous_update=False)
    return Explorer("shift_slider", draw, {"shift": slider}, height=300)


def _numbers(text):
    """Return the numbers of a text such as "1, 2, 3, 10"."""
    words = text.replace("−", "-").replace(",", " ").split()
    require(words, "There are no scores; write some, as in 1, 2, 3, 10")
    return np.array([_number(word) for word in words])


def _number(word):
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number; write scores as in 1, 2, 3, 10") from None
