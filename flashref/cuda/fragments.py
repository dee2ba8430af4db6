"""Tiles in shared memory and fragments in registers: what the tensor-core kernels share.

A tile is some rows of Q, K, V or dO in shared memory, 128 or 256 bytes a row, swizzled: chunk c
(16 bytes) of row r lies at place c ^ (r % 8), so that the eight rows which `ldmatrix` reads at once
fall on different banks, without padding. A warp owns MT row tiles of 16 rows of whatever it
accumulates. Its two products are `rows_by_rows`, C = A Bᵀ over the columns of both, and
`add_rows_by_columns`, C += P B, whose P is the result of the first, rounded to halves: two C
fragments side by side are an A fragment, so nothing leaves the registers. `ptx` has the layouts.
Where other warps want a warp's P, `storer` puts it into a tile too, and `add_by_columns` takes its
A fragments from there: rows of the tile with `load_step`, its columns with `turned_step`.
"""

import math
import types

from numba import cuda, float32, int32, int64, uint32, uint64

from flashref.cuda import ptx

LOG2_E = math.log2(math.e)  # softmax works with 2^x


def row_bytes(D):
    """Return the bytes of a row of D halves in shared memory: 8 or 16 chunks of 16 bytes.

    The swizzle permutes chunks in groups of 8, so a row is whole groups: D = 80, which is 10
    chunks, takes 16.
    """
    return 128 if D <= 64 else 256


def fits(D, WARPS, *tiles):
    """Return whether a block of WARPS warps can copy tiles of so many rows, and multiply them."""
    at_once = 32 * WARPS // (row_bytes(D) // 16)  # rows that the block copies at once
    return at_once % 8 == 0 and all(rows % at_once == 0 and rows % 16 == 0 for rows in tiles)


def tile_functions(D, half, MT, WARPS, inline, ROWS_LAST=False):
    """Return the device functions for warps of 16 MT rows, in blocks of WARPS warps.

    `inline` decorates them. copier(ROWS), rows_by_rows(N, A_IN_REGISTERS) and
    add_rows_by_columns(N) return functions for tiles of so many rows. With ROWS_LAST, the part of
    an address that `ldmatrix` can add by itself comes last: fewer instructions, but more registers.
    """
    THREADS, ROW = 32 * WARPS, row_bytes(D)
    CHUNKS = ROW // 16
    STEP = THREADS // CHUNKS  # rows that the block copies at once
    D_STEPS, D_TILES, D_PAIRS = D // 16, D // 8, D // 16
    mma = ptx.mma_f16 if half == "float16" else ptx.mma_bf16
    pack = ptx.pack_f16 if half == "float16" else ptx.pack_bf16

    @inline
    def row_of(tile, row, odd):
        """Return the address of a row of a tile, and what turns its chunk 2 n + odd: see below.

        `odd` is 0 or 1, or more: anything that has no bit in common with any 2 n.
        """
        return uint32(tile + row * ROW), uint32((odd ^ (row & 7)) << 4)

    @inline
    def chunks_of(here, toggle, rows_on, n):
        """Return the address of chunk 2 n + odd, `rows_on` rows (a multiple of 8) further on.

        It lies at place (2 n + odd) ^ (row % 8). As 2 n + odd is 2 n ^ odd, and rows_on does not
        change row % 8, odd ^ (row % 8) is the same for all n: one XOR is left for each address.
        """
        if ROWS_LAST:
            return uint32(uint32(here + ((n * 32) ^ toggle)) + rows_on * ROW)
        return uint32(here + rows_on * ROW + ((n * 32) ^ toggle))

    def copier(ROWS, SINCE=False):
        @inline
        def copy(tile, source, stride, first, n, columns, since=0):
            """Start copying rows first … first + ROWS - 1 of n; beyond n and columns come zeros.

            With SINCE, also for rows before `since`.
            """
            thread = int32(cuda.threadIdx.x)
            chunk, r = thread % CHUNKS, thread // CHUNKS
            # STEP is a multiple of 8, so the rows that a thread copies have one swizzle
            there = tile + r * ROW + ((chunk ^ (r & 7)) << 4)
            here = source + uint64((int64(first) + r) * stride + chunk * 16)
            size = uint32(cuda.selp(chunk * 8 < columns, 16, 0))
            if first + ROWS <= n and (not SINCE or first >= since):
                for i in range(ROWS // STEP):
                    ptx.copy16(
                        uint32(there + i * STEP * ROW), here + uint64(i * STEP * stride), size
                    )
            else:
                for i in range(ROWS // STEP):
                    some = uint32(cuda.selp(first + r + i * STEP < n, size, uint32(0)))
                    if SINCE:
                        some = uint32(cuda.selp(first + r + i * STEP >= since, some, uint32(0)))
                    ptx.copy16(
                        uint32(there + i * STEP * ROW), here + uint64(i * STEP * stride), some
                    )
            ptx.copy_commit()

        return copy

    @inline
    def load_rows(A, tile, row, step):
        """Load the A fragments of step `step` (16 columns) of the warp's rows of a tile."""
        lane = int32(cuda.threadIdx.x) & 31
        here, toggle = row_of(tile, row + (lane & 15), lane >> 4)
        for mt in range(MT):
            x = (mt * D_STEPS + step) * 4
            a = ptx.ldmatrix(chunks_of(here, toggle, mt * 16, step))
            A[x], A[x + 1], A[x + 2], A[x + 3] = a

    @inline
    def multiply(C, y, A, x, b):
        """C += A B for 16 columns: two fragments of C, and of B, which one `ldmatrix` brings."""
        C[y], C[y + 1], C[y + 2], C[y + 3] = mma(
            A[x], A[x + 1], A[x + 2], A[x + 3], b[0], b[1], C[y], C[y + 1], C[y + 2], C[y + 3]
        )
        C[y + 4], C[y + 5], C[y + 6], C[y + 7] = mma(
            A[x], A[x + 1], A[x + 2], A[x + 3], b[2], b[3],
            C[y + 4], C[y + 5], C[y + 6], C[y + 7],
        )  # fmt: skip

    def rows_by_rows(N, A_IN_REGISTERS):
        N_TILES, N_PAIRS = N // 8, N // 16

        @inline
        def product(C, A, own, other, row):
            """C = A Bᵀ: the N rows of `other` lie by rows, which are the columns that B wants.

            A holds the fragments of the warp's rows of the tile `own`, or is loaded step by step.
            """
            lane = int32(cuda.threadIdx.x) & 31
            here, toggle = row_of(other, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)
            for x in range(MT * N_TILES * 4):
                C[x] = float32(0)
            for step in range(D_STEPS):
                if not A_IN_REGISTERS:
                    load_rows(A, own, row, step)
                # 16 rows, two B fragments in one ldmatrix; the lanes' addresses come in the order
                # b0, b1, b0, b1: mma wants the two in neighbouring registers
                for pair in range(N_PAIRS):
                    b = ptx.ldmatrix(chunks_of(here, toggle, pair * 16, step))
                    for mt in range(MT):
                        multiply(C, (mt * N_TILES + pair * 2) * 4, A, (mt * D_STEPS + step) * 4, b)

        return product

    def add_by_columns(N, ROWS, PAIRS, load):
        """Return C += A B over N rows of B, for 16 ROWS rows of A and 16 PAIRS columns of B.

        load(A, source, step) brings the A fragments of step `step`: 16 of the N.
        """

        @inline
        def add_product(C, source, A, other, pair=0):
            """C += A B, where B is the tile `other` from column 16 · pair on.

            A is room for the A fragments of one step, which nobody else reads.
            """
            lane = int32(cuda.threadIdx.x) & 31
            here, toggle = row_of(other, lane & 15, (lane >> 4) + 2 * pair)
            for step in range(N // 16):
                load(A, source, step)
                for n in range(PAIRS):  # 16 columns, which lie across: transposed
                    b = ptx.ldmatrix_trans(chunks_of(here, toggle, step * 16, n))
                    for mt in range(ROWS):
                        multiply(C, (mt * PAIRS + n) * 8, A, 4 * mt, b)

        return add_product

    def add_rows_by_columns(N):
        """Return C += P B for P's C fragments, which are A fragments when they are rounded."""
        N_TILES = N // 8

        @inline
        def rounded(A, P, step):
            for mt in range(MT):
                for x in range(4):
                    y = (mt * N_TILES + step * 2) * 4 + 2 * x
                    A[4 * mt + x] = pack(P[y], P[y + 1])

        return add_by_columns(N, MT, D_PAIRS, rounded)

    def rounder(N):
        @inline
        def round_fragments(P, C):
            """Round N columns of the warp's C fragments, two to a register."""
            for x in range(MT * N // 4):
                P[x] = pack(C[2 * x], C[2 * x + 1])

        return round_fragments

    def rounded_step(N):
        @inline
        def load(A, P, step):
            """Take the A fragments of a step from registers that a `rounder` filled."""
            for mt in range(MT):
                for x in range(4):
                    A[4 * mt + x] = P[(mt * N // 8 + step * 2) * 2 + x]

        return load

    def storer(N):
        @inline
        def store(P, tile, row, chunk):
            """Store N columns of rounded fragments in a tile, from row `row` and chunk `chunk` on.

            The chunk is a multiple of N / 8. The eight rows that a warp stores at once fall on
            different banks, as those do that an `ldmatrix` reads.
            """
            lane = int32(cuda.threadIdx.x) & 31
            here, toggle = row_of(tile, row + (lane >> 2), chunk)
            here = uint32(here + (lane & 3) * 4)
            for mt in range(MT):
                for n in range(N // 8):
                    x = (mt * N // 8 + n) * 2
                    there = uint32(uint32(here + ((n * 16) ^ toggle)) + mt * 16 * ROW)
                    ptx.store_shared(there, P[x])
                    ptx.store_shared(uint32(there + 8 * ROW), P[x + 1])

        return store

    @inline
    def load_step(A, source, step):
        """Load A fragments of the warp's rows of a tile; source is (tile, row, first chunk)."""
        lane = int32(cuda.threadIdx.x) & 31
        tile, row, chunk = source
        here, toggle = row_of(tile, row + (lane & 15), (lane >> 4) + chunk)
        for mt in range(MT):
            a = ptx.ldmatrix(chunks_of(here, toggle, mt * 16, step))
            A[4 * mt], A[4 * mt + 1], A[4 * mt + 2], A[4 * mt + 3] = a

    def turned_step(ROWS):
        @inline
        def load(A, source, step):
            """Load A fragments whose rows are 16 ROWS columns of a tile; source is (tile, chunk).

            The addresses are those of `rows_by_rows`; transposed, the matrices come as A wants.
            """
            lane = int32(cuda.threadIdx.x) & 31
            tile, chunk = source
            odd = (lane >> 3) & 1
            here, toggle = row_of(tile, (lane & 7) + ((lane >> 4) << 3), odd + chunk)
            for mt in range(ROWS):
                a = ptx.ldmatrix_trans(chunks_of(here, toggle, step * 16, mt))
                A[4 * mt], A[4 * mt + 1], A[4 * mt + 2], A[4 * mt + 3] = a

        return load

    @inline
    def store_rows(C, factor, head, stride, first_row, n, columns):
        """Round the warp's rows of C, times `factor`, and store those below n.

        `columns` is a multiple of 8, as the launch asks: a pair of columns is inside or it is not.
        """
        lane = int32(cuda.threadIdx.x) & 31
        for mt in range(MT):
            for half_tile in range(2):
                i = int32(first_row + mt * 16 + (lane >> 2) + 8 * half_tile)
                for tile in range(D_TILES):
                    x = (mt * D_TILES + tile) * 4 + 2 * half_tile
                    c = tile * 8 + (lane & 3) * 2
                    # c < columns and i < n, in two instructions: `and` would be a branch
                    inside = int32(cuda.selp(c < columns, i, n) < n)
                    to = head + uint64(int64(i) * stride + c * 2)
                    ptx.store_b32(to, pack(C[x] * factor, C[x + 1] * factor), inside)

    @inline
    def block_of(long_first, last_is_long):
        """Return this block's number along the rows, its head and its batch element: `grid_of`."""
        if long_first:
            h, b = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y)
            if last_is_long:
                block = int32(cuda.gridDim.z) - 1 - int32(cuda.blockIdx.z)
            else:
                block = int32(cuda.blockIdx.z)
        else:
            block, h, b = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
        return block, h, b

    @inline
    def head_of(x, b, h):
        """Return the address of row 0 of head h of batch element b."""
        return ptx.global_address(x) + uint64(b * x.strides[0] + h * x.strides[1])

    @inline
    def keys_seen(i, n_k, offset):
        """Return how many of the n_k keys row i sees: the first i + 1 + offset, if there are."""
        return n_k if i + 1 + offset > n_k else i + 1 + offset

    @inline
    def drop_unseen(starts, begin, after, stop):
        """Return the end of the list starts[begin:after] without its tiles from key `stop` on."""
        while begin < after and starts[after - 1] >= stop:
            after -= 1
        return after

    return types.SimpleNamespace(
        copier=copier, load_rows=load_rows, rows_by_rows=rows_by_rows,
        add_by_columns=add_by_columns, add_rows_by_columns=add_rows_by_columns, rounder=rounder,
        rounded_step=rounded_step, storer=storer, load_step=load_step, turned_step=turned_step,
        store_rows=store_rows, block_of=block_of, head_of=head_of, keys_seen=keys_seen,
        drop_unseen=drop_unseen,
    )  # fmt: skip


def grid_of(long_first, blocks, heads, batch):
    """Return the grid from which `block_of` reads.

    Where some blocks have more to do, the long ones of all heads come first, so that none starts
    at the end; else head after head, so that the blocks of the moment share tiles in the cache.
    """
    return (heads, batch, blocks) if long_first else (blocks, heads, batch)
