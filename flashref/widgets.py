"""The pictures of `flashref.plots` with controls: move a slider, and the algorithm runs again.

Unlike a picture, a widget needs a live kernel; draw the picture in the cell before, so that a
reader without one sees it too. Every control works from the keyboard, and a line of text below the
picture says what it shows. Needs ipywidgets.
"""

import base64
import html

import numpy as np

from flashref import plots
from flashref.inputs import float_array, require

try:
    from ipywidgets import HTML, Button, Dropdown, HBox, IntSlider, Layout, Text, VBox
except ImportError as error:
    raise ImportError(
        "flashref.widgets needs ipywidgets, not installed here: python -m pip install ipywidgets"
    ) from error


class Explorer(VBox):
    """Controls, one picture drawn from their values, and its words below.

    The rooms of both have a fixed height, so the page never jumps. Whatever the drawing refuses, it
    refuses as a sentence in that room, not as a traceback.

    Parameters
    ----------
    name : str
        What the widget is called; a reader without a kernel sees it.
    draw : callable
        Called as draw(**values), one value per control; returns a `plots.Picture`.
    controls : dict of str to ipywidgets control
        In the order in which they are to stand.
    adjust : callable, optional
        Called before each drawing; may change the controls' limits and values without a redraw.
    extra : list of ipywidgets, optional
        What else stands among the controls.
    height : int
        Room for the picture in CSS pixels.

    Attributes
    ----------
    controls : dict
        Set `.controls[name].value` to do what a click would.
    text : str
        What the picture shows, or why there is none.
    picture : plots.Picture or None
    """

    def __init__(self, name, draw, controls, *, adjust=None, extra=(), height=300):
        self.name, self.controls = name, controls
        self.picture, self.text = None, ""
        self._draw, self._adjust, self._busy = draw, adjust, False
        self._room = HTML(layout=Layout(height=f"{height}px", overflow="auto"))
        wide = f"{plots.PAGE_WIDTH}px"
        self._words = HTML(layout=Layout(height="5em", max_width=wide, overflow="auto"))
        row = HBox(
            [*controls.values(), *extra], layout=Layout(flex_flow="row wrap", max_width=wide)
        )
        super().__init__([row, self._room, self._words])
        for control in controls.values():
            control.observe(self._update, "value")
        self._update()

    def _update(self, change=None):
        if self._busy:  # `adjust` moved a control; the drawing under way will see it
            return
        self._busy = True
        try:
            if self._adjust is not None:
                self._adjust()
            values = {name: control.value for name, control in self.controls.items()}
            self.picture = self._draw(**values)
            self.text, shown = self.picture.alt, _image(self.picture)
        except Exception as error:  # also whatever a learner's own function raises
            self.picture, self.text = None, _sentence(error)
            shown = f'<p role="alert">{html.escape(self.text)}</p>'
        finally:
            self._busy = False
        self._room.value = shown
        words = html.escape(self.text) if self.picture else ""
        self._words.value = f'<div role="status" style="line-height: 1.4">{words}</div>'

    def __repr__(self):
        """Say to a reader without a kernel what would be here."""
        return f"{self.name}: run this cell to move it; the picture above is where it starts"


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
    scores = ", ".join(f"{s:g}" for s in x)
    controls = {
        "scores": _labelled(Text, "scores", 280, value=scores, continuous_update=False),
        "order": _labelled(Dropdown, "order", 200, options=["as given", "reversed"]),
        "block": _labelled(
            IntSlider,
            "block (scores)",
            280,
            value=block,
            min=1,
            max=len(x),
            continuous_update=False,
        ),
        "step": _labelled(
            IntSlider, "step (blocks seen)", 280, value=1, min=0, continuous_update=False
        ),
    }
    back, forth = _labelled(Button, "Back", 100), _labelled(Button, "Next block", 100)
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

    slider = _labelled(IntSlider, "c", 760, min=-1000, max=1000, continuous_update=False)
    return Explorer("shift_slider", draw, {"shift": slider}, height=300)


def _labelled(kind, label, width, **values):
    """Return a control with the whole of its label, `width` pixels wide."""
    control = kind(description=label, layout=Layout(width=f"{width}px"), **values)
    if kind is not Button:
        control.style.description_width = "initial"
    return control


def _numbers(text):
    """Return the numbers of a text such as "1, 2, 3, 10"."""
    words = text.replace("−", "-").replace(",", " ").split()
    require(words, "There are no scores; write some, as in 1, 2, 3, 10")
    try:
        return np.array([float(word) for word in words])
    except ValueError:
        raise ValueError(
            f"{text!r} holds what is no number; write scores as in 1, 2, 3, 10"
        ) from None


def _image(picture):
    """Return a picture as an HTML element that holds its own bytes and words."""
    data = base64.b64encode(picture.png()).decode("ascii")
    size = f'width="{picture.width}" height="{picture.height}"'
    return f'<img {size} alt="{html.escape(picture.alt)}" src="data:image/png;base64,{data}">'


def _sentence(error):
    if isinstance(error, NotImplementedError):
        return "Not written yet: write the function, run its cell and this one again."
    if isinstance(error, ValueError | TypeError):
        return f"{error}."
    return f"{type(error).__name__}: {error}."
