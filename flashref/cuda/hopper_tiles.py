"""Which tiles a block of `hopper` works on, where they lie in shared memory, who copies them there.

A buffer (Q, or a stage of K or V) goes round in circles, and two barriers say where it is:

    empty ── copy it (TMA, or 128 threads) ──> full ── use it (every warp) ──> empty

The copying warpgroup waits for `empty` and starts a copy, whose bytes, when they are there, end the
phase of `full`; the others wait for `full`, use the buffer, and each warp arrives at `empty`. What
a barrier tells is one bit, the parity of the last phase that is over. Each side counts its rounds
alone: the first time that it comes to a buffer it waits for phase 0 of `full`, or for the phase
before 0 of `empty`, which counts as over, and each time round the parity flips (`next_buffer`).

Both sides must come to the same tiles in the same order, and nobody tells them: `tile_of` and
`key_tiles` are all that they share.

Line numbers are those of FlashAttention-3's Algorithm 1.
"""

import types

from numba import cuda, int32, int64, uint32, uint64

from flashref.cuda import ptx
from flashref.cuda import ptx_hopper as hx
from flashref.cuda.tma import BYTES, COLUMNS

LINE = 128  # bytes: 64 columns of a row
SWIZZLE_BYTES = 1024  # bytes after which the swizzle repeats: tiles start at multiples


def shared_layout(D, schedule):
    """Return where things lie in shared memory: Q from 0 on, tiles of K and V, and barriers.

    A buffer is `full` when its bytes have arrived, `empty` when every warp has used them.
    """
    q, kv = 128 * D * schedule.warpgroups, 2 * D * schedule.BC
    queries, stages = schedule.query_stages, schedule.stages
    sizes = {"Q": queries * q, "K": stages * kv, "V": stages * kv}
    sizes |= dict.fromkeys(("full_Q", "empty_Q"), 8 * queries)
    sizes |= dict.fromkeys(("full_K", "empty_K", "full_V", "empty_V"), 8 * stages)
    places, at = {}, 0
    for name, size in sizes.items():
        places[name], at = at, at + size
    return types.SimpleNamespace(**places, query_tile=q, tile=kv, end=at)


def tile_functions(D, schedule, HIDES, inline):
    """Return the device functions that walk over tiles and fill buffers; `inline` decorates them.

    HIDES: some rows do not see all keys.
    """
    BR, BC, STAGES, PANELS = 64 * schedule.warpgroups, schedule.BC, schedule.stages, D // COLUMNS
    at = shared_layout(D, schedule)
    K, V, Q_TILE, TILE = at.K, at.V, at.query_tile, at.tile
    FULL_Q, EMPTY_Q, FULL_K, EMPTY_K = at.full_Q, at.empty_Q, at.full_K, at.empty_K
    FULL_V, EMPTY_V = at.full_V, at.empty_V

    # -- which tiles: decided here alone ----------------------------------------------------------
    @inline
    def tile_of(deal, q, section):
        """Return this block's next tile of queries, from a deal on.

        That is: is there one; its first row, head, and batch element; the deal after it. The heads
        come in sections of so many. In a deal each block gets a tile of the section, every other
        time in the opposite order, which evens out work that differs; a section begins with an even
        deal.
        """
        blocks, block = uint32(cuda.gridDim.x), uint32(cuda.blockIdx.x)
        rows = uint32((uint32(q.shape[2]) + uint32(BR - 1)) // uint32(BR))
        heads, section = uint32(q.shape[1]), uint32(section)
        of_all = uint32(heads * uint32(q.shape[0]))
        deals = uint32(2) * uint32(
            uint32(section * rows + uint32(2) * blocks - uint32(1)) // uint32(uint32(2) * blocks)
        )
        searching = True
        before, tile, here = uint32(0), uint32(0), uint32(1)
        while searching:
            before = uint32(uint32(deal // deals) * section)  # heads of sections that are over
            if before < of_all:
                here = uint32(of_all - before) if of_all - before < section else section
            tile = uint32(uint32(deal % deals) * blocks)
            if deal & uint32(1):
                tile = uint32(tile + blocks - uint32(1) - block)
            else:
                tile = uint32(tile + block)
            deal = uint32(deal + uint32(1))
            searching = before < of_all and tile >= uint32(here * rows)
        if HIDES:  # long rows first, of all heads of the section
            row, head = uint32(rows - uint32(1) - tile // here), uint32(before + tile % here)
        else:  # head after head
            row, head = uint32(tile % rows), uint32(before + tile // rows)
        more = before < of_all
        return more, uint32(row * uint32(BR)), uint32(head % heads), uint32(head // heads), deal

    @inline
    def key_tiles(first, count, q, k, offset):
        """Return how many tiles of keys so many rows from `first` on see.

        One, which is masked, where they see none; and if there are no such rows.
        """
        stop, n_q = int32(k.shape[2]), int32(q.shape[2])
        if int32(first) >= n_q:
            stop = int32(1)
        elif HIDES:
            end = int32(first) + count
            last_end = int32((n_q if end > n_q else end) + offset)  # of what the last row sees
            stop = last_end if last_end < stop else stop
            stop = stop if stop > 1 else int32(1)
        return uint32((uint32(stop) + uint32(BC - 1)) // uint32(BC))

    def next_of(COUNT):
        @inline
        def next_buffer(stage, phase):
            """Return the buffer that comes next, and the parity of its next phase."""
            stage = uint32(stage + uint32(1))
            if stage == uint32(COUNT):
                return uint32(0), uint32(phase ^ uint32(1))
            return stage, phase

        return next_buffer

    next_query, next_buffer = next_of(schedule.query_stages), next_of(STAGES)

    # -- TMA: one thread --------------------------------------------------------------------------
    def box_loader(ROWS):
        @inline
        def load(to, tensor_map, full, row, head, batch):
            """Start copying ROWS rows, 64 columns at a time; `full` hears when they are there."""
            hx.arrive_expecting(full, uint32(ROWS * PANELS * LINE))
            for panel in range(PANELS):
                hx.load_box(
                    uint32(to + uint32(panel * ROWS * LINE)), tensor_map, full,
                    uint32(panel * COLUMNS), row, head, batch,
                )  # fmt: skip

        return load

    load_queries, load_keys = box_loader(BR), box_loader(BC)

    @inline
    def fill_by_tma(shared, maps, q, k, v, offset, section):
        """Fill the buffers as they become empty: one thread (lines 4 to 10)."""
        q_map = ptx.global_address(maps)
        k_map, v_map = q_map + uint64(BYTES), q_map + uint64(2 * BYTES)
        hx.fence_map(q_map)
        hx.fence_map(k_map)
        hx.fence_map(v_map)
        group = uint32(uint32(q.shape[1]) // uint32(k.shape[1]))
        stage, phase = uint32(0), uint32(1)  # all are empty: phase 1 is over
        q_stage, q_phase = uint32(0), uint32(1)
        more, first, h, b, deal = tile_of(uint32(0), q, section)
        while more:
            barrier = uint32(shared + q_stage * uint32(8))
            hx.wait(barrier + uint32(EMPTY_Q), q_phase)
            to = uint32(shared + q_stage * uint32(Q_TILE))
            load_queries(to, q_map, barrier + uint32(FULL_Q), first, h, b)
            q_stage, q_phase = next_query(q_stage, q_phase)
            kv_head = uint32(h // group)
            j = key_tiles(first, BR, q, k, offset)
            while j > uint32(0):  # the last keys first: only the first tiles need a mask
                j = uint32(j - uint32(1))
                row, buffer = uint32(j * uint32(BC)), uint32(shared + stage * uint32(TILE))
                barrier = uint32(shared + stage * uint32(8))
                hx.wait(barrier + uint32(EMPTY_K), phase)
                load_keys(buffer + uint32(K), k_map, barrier + uint32(FULL_K), row, kv_head, b)
                hx.wait(barrier + uint32(EMPTY_V), phase)
                load_keys(buffer + uint32(V), v_map, barrier + uint32(FULL_V), row, kv_head, b)
                stage, phase = next_buffer(stage, phase)
            more, first, h, b, deal = tile_of(deal, q, section)

    # -- cp.async: 128 threads --------------------------------------------------------------------
    def copier(ROWS):
        @inline
        def copy(to, x, h, b, first, n):
            """Start copying ROWS of the n rows of a head, 64 columns at a time."""
            thread = int32(cuda.threadIdx.x)
            chunk, r = thread & 7, thread >> 3  # of 16 rows at once, so the swizzle is the same
            head = ptx.global_address(x) + uint64(int64(b) * x.strides[0] + int64(h) * x.strides[1])
            row = int32(first) + r
            here = head + uint64(int64(row) * x.strides[2] + chunk * 16)
            there = uint32(to + uint32(r * LINE + ((chunk ^ (r & 7)) << 4)))
            for panel in range(PANELS):
                inside = panel * COLUMNS + chunk * 8 < int32(x.shape[3])
                size = uint32(cuda.selp(inside, uint32(16), uint32(0)))
                for i in range(0, ROWS, 16):
                    some = uint32(cuda.selp(row + i < n, size, uint32(0)))
                    ptx.copy16(
                        uint32(there + uint32((panel * ROWS + i) * LINE)),
                        here + uint64(int64(i) * x.strides[2] + panel * LINE), some,
                    )  # fmt: skip
            ptx.copy_commit()

        return copy

    copy_queries, copy_keys = copier(BR), copier(BC)

    @inline
    def publish(full):
        """Say that this thread's part of a buffer is there."""
        hx.fence_writes()
        hx.arrive(full)

    @inline
    def fill_by_threads(shared, q, k, v, offset, section):
        """Do the same with all threads: a buffer is published when the next copy is on its way."""
        group = uint32(uint32(q.shape[1]) // uint32(k.shape[1]))
        n_q, n_k = int32(q.shape[2]), int32(k.shape[2])
        # keys that some row sees: beyond them zeros arrive, as they do through a tensor map
        seen = int32(n_q + offset) if int32(n_q + offset) < n_k else n_k
        stage, phase = uint32(0), uint32(1)
        q_stage, q_phase = uint32(0), uint32(1)
        more, first, h, b, deal = tile_of(uint32(0), q, section)
        while more:
            barrier = uint32(shared + q_stage * uint32(8))
            hx.wait(barrier + uint32(EMPTY_Q), q_phase)
            copy_queries(uint32(shared + q_stage * uint32(Q_TILE)), q, h, b, first, n_q)
            under_way = uint32(barrier + uint32(FULL_Q))
            q_stage, q_phase = next_query(q_stage, q_phase)
            kv_head = uint32(h // group)
            j = key_tiles(first, BR, q, k, offset)
            while j > uint32(0):
                j = uint32(j - uint32(1))
                row, buffer = uint32(j * uint32(BC)), uint32(shared + stage * uint32(TILE))
                barrier = uint32(shared + stage * uint32(8))
                hx.wait(barrier + uint32(EMPTY_K), phase)
                copy_keys(buffer + uint32(K), k, kv_head, b, row, seen)
                hx.copy_wait_but_one()
                publish(under_way)
                hx.wait(barrier + uint32(EMPTY_V), phase)
                copy_keys(buffer + uint32(V), v, kv_head, b, row, seen)
                hx.copy_wait_but_one()
                publish(uint32(barrier + uint32(FULL_K)))
                under_way = uint32(barrier + uint32(FULL_V))
                stage, phase = next_buffer(stage, phase)
            ptx.copy_wait()
            publish(under_way)
            more, first, h, b, deal = tile_of(deal, q, section)

    return types.SimpleNamespace(
        tile_of=tile_of, key_tiles=key_tiles, next_query=next_query, next_buffer=next_buffer,
        fill_by_tma=fill_by_tma, fill_by_threads=fill_by_threads,
    )  # fmt: skip
