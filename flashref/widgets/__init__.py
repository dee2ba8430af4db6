"""The pictures of `flashref.plots` with controls: move a slider, and the algorithm runs again.

Unlike a picture, a widget needs a live kernel; draw the picture in the cell before, so that a
reader without one sees it too. Every control works from the keyboard, and a line of text below the
picture says what it shows. Needs ipywidgets and matplotlib.
"""

try:
    import ipywidgets  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "flashref.widgets needs ipywidgets, not installed here: python -m pip install ipywidgets",
        name=error.name,
    ) from error

from flashref.widgets.explorer import Explorer
from flashref.widgets.masks import mask_explorer
from flashref.widgets.pipeline import pipeline_explorer
from flashref.widgets.softmax import shift_slider, softmax_stepper
from flashref.widgets.tiles import tile_stepper
from flashref.widgets.traffic import block_size_explorer, roofline_explorer

__all__ = [
    "Explorer",
    "block_size_explorer",
    "mask_explorer",
    "pipeline_explorer",
    "roofline_explorer",
    "shift_slider",
    "softmax_stepper",
    "tile_stepper",
]
