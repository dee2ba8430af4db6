"""Slow memory whose traffic can be counted.

The paper's lines "load K_j from HBM to on-chip SRAM" and "write O_i to HBM" are lines of our code:
`K_j = hbm.load("K", K, cols)` and `hbm.store("O", O, rows, O_i)`. `DIRECT` passes the data
through. `Memory` also counts elements, tracks what is on chip, and tells a listener about it all.
"""

from collections import Counter
from typing import NamedTuple

from flashref.inputs import count


class Event(NamedTuple):
    """One thing that happened between slow and fast memory; see `Memory.events`."""

    kind: str  #: "load", "store", or "tile" (a tile of S is being worked on)
    name: str  #: the array; "S" for a tile
    where: slice | tuple  #: the rows that moved; for a tile of S, (rows, columns)
    elements: int  #: how many elements moved; for a tile, how many are on chip
    head: int  #: which query head, counting the leading axes in C order


class Memory:
    """Slow memory that counts what moves; the algorithms call it `hbm`.

    Parameters
    ----------
    sram_elements : int, optional
        Size M of the fast memory in elements (not bytes). flashref's algorithms are refused before
        anything moves if their tiles do not fit; a loop of yours where it calls `on_chip`. None: no
        limit.
    listener : callable, optional
        Called as listener(event, tiles) for every `Event`; tiles maps names to the arrays that
        moved, or that are on chip. They are live: copy what must last.

    Attributes
    ----------
    loads, stores : int
        Elements read from and written to slow memory, over all arrays.
    loads_by_array, stores_by_array : Counter
        The same for each array name.
    peak_sram : int
        Most elements that were on chip at once: the tiles of one step, row temporaries not counted.
    events : list of Event
        Everything that happened, in order.

    Examples
    --------
    >>> import numpy as np
    >>> hbm, K = Memory(), np.zeros((8, 4))
    >>> K_j = hbm.load("K", K, slice(2, 4))
    >>> hbm.store("K", K, slice(0, 2), K_j)
    >>> hbm.loads, hbm.stores
    (8, 8)
    """

    def __init__(self, sram_elements=None, *, listener=None):
        if sram_elements is not None:
            sram_elements = count("sram_elements", sram_elements, hint=" (elements, not bytes)")
        if listener is not None and not callable(listener):
            raise TypeError(f"listener={listener!r} must be callable, as listener(event, tiles)")
        self.sram_elements = sram_elements
        self.listener = listener
        self.loads_by_array, self.stores_by_array = Counter(), Counter()
        self.peak_sram = 0
        self.events = []
        self.head = 0

    @property
    def loads(self):
        """Elements read from slow memory so far."""
        return self.loads_by_array.total()

    @property
    def stores(self):
        """Elements written to slow memory so far."""
        return self.stores_by_array.total()

    def load(self, name, array, rows):
        """Return array[rows], counted as read from slow memory under this name."""
        tile = array[rows]
        self.loads_by_array[name] += tile.size
        self._report("load", name, rows, tile.size, {name: tile})
        return tile

    def store(self, name, array, rows, tile):
        """Set array[rows] = tile, counted as written to slow memory under this name."""
        array[rows] = tile
        moved = array[rows]
        self.stores_by_array[name] += moved.size
        self._report("store", name, rows, moved.size, {name: moved})

    def on_chip(self, rows, cols, **tiles):
        """Note the tiles that share the fast memory while one tile of S is worked on."""
        elements = sum(tile.size for tile in tiles.values())
        if self.sram_elements is not None and elements > self.sram_elements:
            sizes = ", ".join(f"{name} {tile.size:,}" for name, tile in tiles.items())
            raise ValueError(f"{elements:,} on chip, sram_elements={self.sram_elements:,}: {sizes}")
        self.peak_sram = max(self.peak_sram, elements)
        self._report("tile", "S", (rows, cols), elements, tiles)

    def _report(self, kind, name, where, elements, tiles):
        event = Event(kind, name, where, int(elements), self.head)
        self.events.append(event)
        if self.listener is not None:
            self.listener(event, tiles)

    def __repr__(self):
        """Show the counts, for a notebook cell that ends in `hbm`."""
        moved = f"loads={self.loads:,} stores={self.stores:,} peak_sram={self.peak_sram:,}"
        return f"<Memory {moved} elements>"


class _Direct:
    """What the algorithms use when nobody counts: views and plain assignment."""

    sram_elements = None

    @staticmethod
    def load(name, array, rows):
        return array[rows]

    @staticmethod
    def store(name, array, rows, tile):
        array[rows] = tile

    @staticmethod
    def on_chip(rows, cols, **tiles):
        pass


DIRECT = _Direct()
