"""The pictures of `flashref.plots` with controls: move a slider, and the algorithm runs again.

Unlike a picture, a widget needs a live kernel; draw the picture in the cell before, so that a
reader without one sees it too. Every control works from the keyboard, and a line of text below the
picture says what it shows. Needs ipywidgets and matplotlib.
"""

try:
    import ipywidgets  # noqa: F401
except ImportError as error:
    raise ImportError(
        "flashref.widgets needs ipywidgets, not installed here: python -m pip install ipywidgets"
    ) from error

from flashref.widgets.explorer import Explorer
from flashref.widgets.softmax import shift_slider, softmax_stepper

__all__ = ["Explorer", "shift_slider", "softmax_stepper"]
