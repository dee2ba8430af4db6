"""What every picture has in common: its palette, its type sizes, and `Picture` itself.

The palette is Okabe and Ito's, which the common forms of colour blindness leave distinct; nothing
is told by colour alone (hatch and label say it too).
"""

import base64
import io

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave

from flashref.inputs import count, require

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PURPLE, INK = "#0072B2", "#D55E00", "#CC79A7", "#222222"
PALE, GREY = "#E8E8E8", "#767676"

PAGE_WIDTH = 826  # CSS pixels, what fits a notebook's column
PIXELS_PER_INCH = 96  # of the page; the picture itself has twice as many, for sharp screens
STYLE = {
    "font.size": 10.5,
    "figure.dpi": 2 * PIXELS_PER_INCH,
    "figure.titlesize": 11,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "hatch.linewidth": 0.7,
}
styled = matplotlib.rc_context(STYLE)


class Picture:
    """A figure and its alternative text; a notebook shows the one and hands on the other.

    Attributes
    ----------
    figure : matplotlib.figure.Figure
    alt : str
        What the picture shows, in words; also its plain-text form.
    """

    def __init__(self, figure, alt):
        self.figure, self.alt = figure, alt

    @property
    def width(self):
        """Width on the page in CSS pixels."""
        return round(self.figure.get_figwidth() * PIXELS_PER_INCH)

    @property
    def height(self):
        """Height on the page in CSS pixels."""
        return round(self.figure.get_figheight() * PIXELS_PER_INCH)

    @styled
    def png(self):
        """Return the picture as the bytes of a PNG file."""
        # savefig would draw twice, and a widget waits for this
        canvas = FigureCanvasAgg(self.figure)
        canvas.draw()
        with io.BytesIO() as file:
            imsave(file, canvas.buffer_rgba(), format="png")
            return file.getvalue()

    def save(self, path):
        """Write the picture to a PNG file."""
        with open(path, "wb") as file:
            file.write(self.png())

    def __repr__(self):
        """Show the alternative text."""
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {"text/plain": self.alt, "image/png": base64.b64encode(self.png()).decode("ascii")}
        return data, {"image/png": {"width": self.width, "alt": self.alt}}


def page_figure(height, layout=None):
    """Return an empty figure as wide as the page and `height` inches high."""
    return Figure(figsize=(PAGE_WIDTH / PIXELS_PER_INCH, height), layout=layout)


def counts(**values):
    """Return the values as ints; anything but integers of at least 1 is refused by its name."""
    return [count(name, value) for name, value in values.items()]


def titled(name, things, what):
    """Return a dict of title to what is drawn under it; anything else, and none, is refused."""
    if not isinstance(things, dict) or not all(isinstance(title, str) for title in things):
        raise TypeError(f"{name}={things!r} must be a dict of title to {what}")
    require(things, f"{name} is empty; give at least one title with {what}")
    return things
