"""Lesson 11: FlashAttention-3's schedules, with sliders for what each task takes."""

from ipywidgets import Dropdown, IntSlider

from flashref import flash3, plots
from flashref.inputs import count
from flashref.widgets.explorer import Explorer, labelled

BLOCKS, BUFFERS, TIME = 6, 4, 8  # the sliders end here, or where they start


def pipeline_explorer(
    kind="ping-pong, two-stage", blocks=4, *, load=3, qk=2, softmax=2, pv=2, buffers=3
):
    """Choose a schedule, the times of its tasks and the number of buffers, and see who waits.

    Parameters
    ----------
    kind : str
        The schedule at the start, one of `flash3.KINDS`.
    blocks : int
        Blocks of keys at the start.
    load, qk, softmax, pv : int
        How long each task takes at the start, in the simulation's units of time.
    buffers : int
        How many blocks have room in fast memory at the start.

    Returns
    -------
    explorer : Explorer
        With the controls kind, blocks, buffers, load, qk, softmax and pv.

    Raises
    ------
    TypeError, ValueError
        If there is no such kind, or another argument is no integer that its slider can take.
    """
    flash3.programs(kind, blocks)  # a name that no menu has is refused here

    def slider(label, name, value, least, most):
        value = count(name, value, least)
        ends = {"min": least, "max": max(most, value), "continuous_update": False}
        return labelled(IntSlider, label, 270, value=value, **ends)

    controls = {
        "kind": labelled(Dropdown, "schedule", 270, options=list(flash3.KINDS), value=kind),
        "blocks": slider("key blocks", "blocks", blocks, 1, BLOCKS),
        "buffers": slider("buffers (blocks)", "buffers", buffers, 1, BUFFERS),
        "load": slider("load (time)", "load", load, 0, TIME),
        "qk": slider("QKᵀ (time)", "qk", qk, 0, TIME),
        "softmax": slider("softmax (time)", "softmax", softmax, 0, TIME),
        "pv": slider("PV (time)", "pv", pv, 0, TIME),
    }

    def draw(kind, blocks, **values):
        return plots.timeline({kind: flash3.schedule(kind, blocks, **values)})

    return Explorer("pipeline_explorer", draw, controls, height=325)
