"""The frame of every widget: controls, one picture drawn from their values, its words below."""

import base64
import html
import io
import time

import numpy as np
from ipywidgets import HTML, Button, HBox, Layout, Play, VBox, link
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from flashref.plots.picture import PAGE_WIDTH, styled

PATIENCE = 0.2  # seconds; a control that took longer the last time is answered by a word first


class Explorer(VBox):
    """Controls, one picture drawn from their values, and its words below.

    The rooms of both have a fixed height, so the page never jumps. Whatever the drawing refuses, it
    refuses as a sentence in that room, not as a traceback. The old picture stays until the new one
    is there; where that takes long, the words say so meanwhile.

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
        self._draw, self._adjust, self._busy, self._slow = draw, adjust, False, set()
        self._room = HTML(layout=Layout(height=f"{height}px", overflow="auto"))
        wide = f"{PAGE_WIDTH}px"
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
        self._busy, moved, began = True, change and change.owner, time.monotonic()
        if moved in self._slow:
            self._say("Computing …")
        try:
            if self._adjust is not None:
                self._adjust()
            values = {name: control.value for name, control in self.controls.items()}
            self.picture = self._draw(**values)
            self.text, shown = self.picture.alt, image(self.picture)
        except Exception as error:  # also whatever a learner's own function raises
            self.picture, self.text = None, _sentence(error)
            shown = f'<p role="alert">{html.escape(self.text)}</p>'
        finally:
            self._busy = False
        self._room.value = shown
        self._say(self.text if self.picture else "")
        slow = time.monotonic() - began > PATIENCE
        (self._slow.add if slow else self._slow.discard)(moved)

    def _say(self, words):
        words = html.escape(words)
        self._words.value = f'<div role="status" style="line-height: 1.4">{words}</div>'

    def __repr__(self):
        """Say to a reader without a kernel what would be here."""
        return f"{self.name}: run this cell to move it; the picture above is where it starts"


def labelled(kind, label, width, **values):
    """Return a control with the whole of its label, `width` pixels wide."""
    control = kind(description=label, layout=Layout(width=f"{width}px"), **values)
    if kind is not Button:
        control.style.description_width = "initial"
    return control


def step_buttons(step, forth="Next", interval=1000):
    """Return Back, Next and Play for a slider over steps; they follow its value and its limits.

    Parameters
    ----------
    step : ipywidgets.IntSlider
    forth : str
        What the button for the next step says.
    interval : int
        Milliseconds from step to step while it plays.

    Returns
    -------
    widgets : list of ipywidgets
    """
    back, after = labelled(Button, "Back", 90), labelled(Button, forth, 100)
    start = labelled(Button, "Play", 90)
    # its own buttons have no names that a screen reader could say: ours start and stop it, unseen
    play = Play(interval=interval, layout=Layout(display="none"))
    for trait in ("max", "min", "value"):  # the limits first, or the value would be cut to them
        link((step, trait), (play, trait))

    def follow(change=None):
        back.disabled, after.disabled = step.value <= step.min, step.value >= step.max
        start.description = "Pause" if play.playing else "Play"

    def move(by):
        step.value = min(max(step.value + by, step.min), step.max)

    def start_or_stop(button):
        if not play.playing and step.value == step.max:
            step.value = step.min
        play.playing = not play.playing

    step.observe(follow, ["value", "min", "max"])
    play.observe(follow, "playing")
    follow()
    back.on_click(lambda button: move(-1))
    after.on_click(lambda button: move(+1))
    start.on_click(start_or_stop)
    return [back, after, start, play]


def image(picture):
    """Return a picture as an HTML element that holds its own bytes and words."""
    data = base64.b64encode(_quick_png(picture)).decode("ascii")
    size = f'width="{picture.width}" height="{picture.height}"'
    alt = html.escape(picture.alt)
    # decoded together with the page, lest the room be blank for a moment
    return f'<img {size} alt="{alt}" decoding="sync" src="data:image/png;base64,{data}">'


@styled
def _quick_png(picture):
    """Return the picture for somebody who waits: 256 colours, a third of the bytes of its `png`."""
    canvas = FigureCanvasAgg(picture.figure)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    drawn = drawn.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    colours = np.array(drawn.getpalette())
    colours[colours > 252] = 255  # the page is white
    drawn.putpalette(colours.tolist())
    with io.BytesIO() as file:
        drawn.save(file, "png", compress_level=1)
        return file.getvalue()


def _sentence(error):
    if isinstance(error, NotImplementedError):
        return "Not written yet: write the function, run its cell and this one again."
    if isinstance(error, ValueError | TypeError):
        return f"{error}."
    return f"{type(error).__name__}: {error}."
