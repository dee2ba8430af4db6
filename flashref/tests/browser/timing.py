"""How long each widget takes to answer, and what it looks like: for people, not for a test.

    python -m flashref.tests.browser.timing [--folder FOLDER]

prints the median of ten redraws without a browser, at the size a widget starts with and at its
largest; where there is a browser also the time from a key to the new picture on the page. With a
folder it puts three screenshots of each widget there. No number travels: read them side by side.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import nbformat
import numpy as np

from flashref import widgets
from flashref.tests.browser import lab


def naive(x):
    """Return the softmax by the bare formula, for shift_slider."""
    e = np.exp(x)
    return e / e.sum()


# the call; a control and two values to go to and fro between; the settings of the largest size; and
# two more settings for the screenshots
WIDGETS = {
    "softmax_stepper": (
        "widgets.softmax_stepper()", ("step", 2, 1), {"block": 1, "step": 4},
        [{"step": 0}, {"order": "reversed", "step": 2}],
    ),
    "shift_slider": (
        "widgets.shift_slider(naive)", ("shift", 7, 8), {"shift": 1000},
        [{"shift": 11}, {"shift": -800}],
    ),
    "roofline_explorer": (
        "widgets.roofline_explorer()", ("n", 2048, 1024), {"n": 16_384, "d": 256},
        [{"dtype": "fp32"}, {"n": 8, "d": 256}],
    ),
    "tile_stepper": (
        "widgets.tile_stepper()", ("step", 2, 3), {"n": 32, "block_q": 1, "block_k": 1, "step": 99},
        [{"direction": True, "causal": True}, {"algorithm": "compare", "n": 16, "step": 20}],
    ),
    "block_size_explorer": (
        "widgets.block_size_explorer()", ("block_q", 65, 64), {"n": 16_384},
        [{"algorithm": "FA2 forward"}, {"sram_elements": 1024}],
    ),
    "mask_explorer": (
        "widgets.mask_explorer()", ("block_q", 9, 8), {"n_q": 256, "n_k": 256, "block_q": 1},
        [{"pattern": "window", "left": 20}, {"pattern": "butterfly", "n_k": 256}],
    ),
    "pipeline_explorer": (
        "widgets.pipeline_explorer()", ("load", 2, 3), {"blocks": 6, "buffers": 4},
        [{"load": 8}, {"buffers": 1}],
    ),
}  # fmt: skip


# asking from outside for a picture's bytes until they change would hold up the page that draws it
STOPWATCH = """root => {
  const before = root.querySelector('img').src;
  window.pressed = window.painted = 0;
  const press = () => { window.pressed = performance.now(); };
  document.addEventListener('keydown', press, { capture: true, once: true });
  const watch = new MutationObserver(async () => {
    const img = root.querySelector('img');
    if (!img || img.src === before) return;
    watch.disconnect();
    await img.decode();
    requestAnimationFrame(() => setTimeout(() => { window.painted = performance.now(); }));
  });
  watch.observe(root, { subtree: true, childList: true, attributes: true }); }"""


def redraws(widget, name, there, back):
    """Return the milliseconds of ten redraws, five there and five back."""
    times = []
    for value in [there, back] * 5:
        start = time.perf_counter()
        widget.controls[name].value = value
        times.append(1e3 * (time.perf_counter() - start))
    return times


def without_browser():
    """Print how long a redraw takes at the first and at the largest size."""
    print(f"{'milliseconds':24}{'start':>8}{'largest':>9}{'slowest':>9}")
    for name, (call, move, largest, _) in WIDGETS.items():
        widget = eval(call, {"widgets": widgets, "naive": naive})
        first = redraws(widget, *move)
        for control, value in largest.items():
            widget.controls[control].value = value
        at_most = redraws(widget, *move)
        medians = statistics.median(first), statistics.median(at_most)
        slowest = max(first + at_most)
        print(f"{name:24}{medians[0]:8.0f}{medians[1]:9.0f}{slowest:9.0f}")


def with_browser(folder, top):
    """Print the time from a change in the kernel to the page; keep screenshots in the folder."""
    from playwright.sync_api import sync_playwright

    with lab.server(top) as (address, token), sync_playwright() as playwright:
        flags = {"executable_path": lab.chromium(), "args": lab.CHROMIUM_FLAGS}
        browser = playwright.chromium.launch(**flags)
        reader = lab.Reader(browser, address, token)
        for name, (call, (control, *_), largest, settings) in WIDGETS.items():
            cells = [
                "import numpy as np\nfrom flashref import widgets\n"
                "naive = lambda x: np.exp(x) / np.exp(x).sum()",
                f"w = {call}\nw",
            ]
            settings = [*settings, largest]
            for at, values in enumerate(settings):
                lines = [f"w.controls[{key!r}].value = {value!r}" for key, value in values.items()]
                cells.append("\n".join([*lines, f"# setting {at}"]))
            notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
            notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
            nbformat.write(notebook, top / f"{name}.ipynb")
            reader.open(f"{name}.ipynb")
            widget = reader.run(f"w = {call}")
            widget.root.evaluate("root => { root.dataset.kept = 'here' }")
            widget.root = reader.page.locator("[data-kept]")
            label = eval(call, {"widgets": widgets, "naive": naive}).controls[control].description
            times = [response(widget, label, key) for key in ["ArrowLeft", "ArrowRight"] * 5]
            print(f"{name:24}{statistics.median(times):8.0f} ms from the key to the page")
            if folder:
                widget.root.screenshot(path=folder / f"{name}-start.png")
                for at in range(len(settings)):
                    reader.execute(f"# setting {at}", upto=False)
                    reader.page.wait_for_timeout(1500)
                    widget.root.screenshot(path=folder / f"{name}-{at}.png")
        browser.close()


def response(widget, label, key):
    """Return the milliseconds from a key on a slider to the painted new picture, by the page."""
    widget.root.evaluate(STOPWATCH)
    widget.press(label, key)
    widget.page.wait_for_function("window.painted > 0")
    took = widget.page.evaluate("window.painted - window.pressed")
    widget.page.wait_for_timeout(150)  # the words come after the picture, and a reader looks at it
    return took


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="where to put screenshots; default: nowhere")
    folder = parser.parse_args().folder
    without_browser()
    if reason := lab.missing():
        print(f"Without a browser: {reason}.")
        return
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as top:
        with_browser(folder, Path(top))


if __name__ == "__main__":
    main()
