"""`python -m flashref figures`: draw every picture of figures/ again, byte for byte the same.

Same bytes on the same machine with the same matplotlib and fonts; elsewhere the same picture.
"""

import argparse
from pathlib import Path

from flashref import plots

FIGURES = {"traffic_by_block.png": plots.traffic_by_block}


def main(argv=None):
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m flashref figures", description=__doc__)
    parser.add_argument("--folder", default="figures", help="where to put them (default: figures)")
    folder = Path(parser.parse_args(argv).folder)
    folder.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        picture = draw()
        picture.save(folder / name)
        print(f"{folder / name}: {picture.alt}")
    return 0
