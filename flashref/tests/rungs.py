"""The algorithms behind one interface, so that one suite serves all of them.

A rung is an algorithm with its block sizes. `rungs(package)` takes the package as an argument: the
sabotage suite hands in wounded ones.
"""

from typing import NamedTuple

import numpy as np

import flashref

BLOCKS = [(1, 1), (2, 2), (3, 2), (2, 3), (16, 16)]  # single, square, ragged, wider than n


class Result(NamedTuple):
    """Forward and backward of one call."""

    o: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class Rung(NamedTuple):
    """One algorithm with its block sizes; `blocks` is empty for standard attention."""

    name: str
    blocks: tuple
    package: object

    def __str__(self):
        return "-".join([self.name, *map(str, self.blocks)])

    def forward(self, q, k, v, **options):
        """Return (o, lse)."""
        args, options = self._arguments(q, k, options)
        forward = getattr(self.package, self.name)
        return forward(q, k, v, *args, return_lse=True, **options)

    def backward(self, do, q, k, v, o, lse, **options):
        """Return (dq, dk, dv); standard attention makes its own o and lse."""
        args, options = self._arguments(q, k, options)
        saved = (o, lse) if self.blocks else ()
        backward = getattr(self.package, self.name + "_backward")
        return backward(do, q, k, v, *saved, *args, **options)

    def run(self, q, k, v, do, **options):
        """Return forward and backward together."""
        o, lse = self.forward(q, k, v, **options)
        return Result(o, lse, *self.backward(do, q, k, v, o, lse, **options))

    @property
    def flash(self):
        """Whether the backward takes o and lse."""
        return bool(self.blocks)

    def _arguments(self, q, k, options):
        """Return what this algorithm wants beside q, k, v: positional and by name."""
        if not self.blocks:
            return (), options
        block_q, block_k = self.blocks
        options = {"block_q": block_q, "block_k": block_k, **options}
        if self.name != "block_sparse_attention":
            return (), options
        tiles = (-(-np.shape(q)[-2] // block_q), -(-np.shape(k)[-2] // block_k))
        return (options.pop("block_mask", np.ones(tiles, bool)),), options


TILED = ("flash_attention_1", "flash_attention_2", "block_sparse_attention")


def rungs(package=flashref, blocks=BLOCKS, names=("standard_attention", *TILED)):
    """Return every algorithm with every choice of blocks (standard attention has none)."""
    return [
        Rung(name, size, package)
        for name in names
        for size in ([()] if name == "standard_attention" else blocks)
    ]
