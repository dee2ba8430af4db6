"""A block mask as the kernels read it: for each block of rows, the list of its tiles.

A kernel that asked the mask about every tile would still walk over all of them. A list leaves the
walk to the host, which makes it once: for query block i the first keys of its tiles are
starts[first_of[i] : first_of[i + 1]], ascending (compressed sparse rows); for a key block, in the
pass over keys of the backward, the first queries. A tile of the mask may hold several of a kernel.
"""

import functools

import numpy as np

from flashref.inputs import any_array

TILE = 64  # each kernel has blocks whose sides divide it


class BlockMask:
    """A checked block mask (T_r, T_c) over n_q queries and n_k keys."""

    def __init__(self, mask, block_q, block_k, n_q, n_k):
        for name, block in (("block_q", block_q), ("block_k", block_k)):
            if isinstance(block, bool) or not hasattr(block, "__index__"):
                raise TypeError(f"{name}={block!r} must be an integer")
            if block < 1 or block % TILE:
                raise ValueError(
                    f"{name}={block} must be a multiple of {TILE}: the kernels' tiles have so many "
                    f"rows, or a fraction of it"
                )
        mask = any_array("block_mask", mask)
        if mask.dtype != bool:
            raise TypeError(f"block_mask has dtype {mask.dtype}; it must be bool, True = there")
        shape = -(-n_q // block_q), -(-n_k // block_k)
        if mask.shape != shape:
            raise ValueError(
                f"block_mask has shape {mask.shape}; {n_q} queries in blocks of {block_q} and "
                f"{n_k} keys in blocks of {block_k} ask for {shape}, one mask for all heads"
            )
        self.mask, self.sizes = mask, (n_q, n_k)
        self.block_q, self.block_k = int(block_q), int(block_k)

    def blocks(self, own):
        """Return the rows of a mask's block on the side a kernel owns, and on the other."""
        sizes = self.block_q, self.block_k
        return sizes if own == "queries" else sizes[::-1]

    def fitting(self, options, own):
        """Return the options (rows owned, rows of a tile, ...) whose tiles divide the blocks."""
        blocks = self.blocks(own)
        return [x for x in options if blocks[0] % x[0] == 0 and blocks[1] % x[1] == 0]

    def lists(self, own, rows):
        """Return where the tiles of `rows` rows of each own block begin: first_of and starts."""
        key = own, rows, self.mask.tobytes(), self.mask.shape, self.sizes
        return _lists(*key, self.blocks(own)[1])


class Lists(tuple):
    """The lists of a mask: the same object for the same mask, so it can stand for them as a key."""

    __hash__, __eq__ = object.__hash__, object.__eq__


@functools.lru_cache(64)
def _lists(own, rows, mask, shape, sizes, other_block):
    mask = np.frombuffer(mask, bool).reshape(shape)
    mask, n = (mask, sizes[1]) if own == "queries" else (mask.T, sizes[0])
    inside = np.arange(0, other_block, rows)
    starts = [(np.flatnonzero(row)[:, None] * other_block + inside).ravel() for row in mask]
    starts = [x[x < n] for x in starts]
    first_of = np.cumsum([0, *map(len, starts)], dtype=np.int32)
    starts = np.concatenate([*starts, [0]]).astype(np.int32)  # never empty: it has an address
    return Lists((first_of, starts))
