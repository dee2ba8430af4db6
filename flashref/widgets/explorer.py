"""The frame of every widget: controls, one picture drawn from their values, its words below."""

import base64
import html

from ipywidgets import HTML, Button, HBox, Layout, VBox

from flashref.plots.picture import PAGE_WIDTH


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
        self._busy = True
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
        words = html.escape(self.text) if self.picture else ""
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


def image(picture):
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
