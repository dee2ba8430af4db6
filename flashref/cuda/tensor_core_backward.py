"""The backward pass on tensor cores: Algorithm 2, in one pass over keys or in two passes.

A block of the pass over keys owns keys: its warps keep dK and dV of their rows in registers while
the queries pass by, and compute P again from lse, and dP = dO Vᵀ, with the tiles and fragments of
the forward pass. They compute Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, not S and dP: then a warp's rows of P and
dS are rows of dV = Pᵀ dO and dK = dSᵀ Q, and both are A fragments of these products as they lie in
the registers. dQ = dS K sums over keys, so over blocks, and there are two ways to get it:

One pass, as FlashAttention-2 does it. The warps put their dS into a tile in shared memory, share
out the product dQ_i = dS K_j among themselves, and the memory adds it to an array in float32.
These are 5 products. But blocks come in whatever order, and a sum of floats depends on its order:
equal calls may give a dq that differs in its last bits.
Two passes, with `deterministic`. In a second kernel a block owns queries, as in the forward pass,
and keeps dQ while the keys pass by. S and dP are computed twice, which makes 7 products; in return
each sum has one order, and equal calls give equal bits.

A kernel before leaves L · log2 e and D = rowsum(dO ∘ O) side by side, so that one load brings what
two scores need, and zeros where dQ will be added up; one after rounds dQ.
dK and dV of 16 keys are D numbers a thread, and a tile of Sᵀ and dPᵀ comes on top: all 255
registers. At D = 128 a warp with rows of its own would read each fragment of Q and dO for one
row tile only, and reading takes longest. So two warps share 32 keys: each computes P and dS for
half of a tile's queries, and owns half the columns of dK and dV; what it needs of the other's P and
dS, both write to shared memory. Then each fragment serves two row tiles.
What it costs. Shared memory: K, V of the keys, Q, dO of this tile and of the next, dS, and P where
warps share rows: 65 KiB at D = 64 and 161 at D = 128; in two passes 49 and 161, then 48 and 96.
Device memory: 8 bytes for each query of each head, and in one pass 4 more for each of its 64 or 128
columns.
What is bad about it: P and dS are rounded to halves before the products that sum them up; a dS
beyond 65504 is infinite in float16. In one pass there are two barriers a tile, as there are where
warps share rows; widths between 64 and 128 cost dQ's product as much as 128; and a NaN in a row
of K can reach all queries of a tile of which one sees any key of its block.
"""

import functools

from numba import cuda, float32, int32, int64, uint32, uint64

from flashref.cuda import ptx
from flashref.cuda.fragments import LOG2_E, fits, grid_of, row_bytes, tile_functions
from flashref.cuda.launch import F32, F32_3D, F32_4D, HALF_4D, I32, TILE_LISTS, Kernel, cdiv, inline

# Most columns: (keys owned, queries of a tile, warps, K and V in registers, warps that share rows),
# best first. On an H200, the first of ONE_PASS were the fastest of the ten and six that were tried
ONE_PASS = {
    64: ((128, 32, 4, False, 1), (64, 64, 4, True, 2), (64, 32, 4, True, 1)),
    128: ((128, 64, 8, False, 2), (64, 64, 4, False, 2), (64, 32, 4, False, 2)),
}
KEYS = {  # the first of two passes
    64: ((128, 32, 4, False, 1), (64, 64, 4, True, 1), (64, 32, 4, True, 1)),
    128: ((128, 64, 8, False, 2), (64, 64, 4, False, 2), (64, 32, 4, False, 1)),
}
QUERIES = {  # the second: (queries owned, keys of a tile, warps, Q and dO in registers)
    64: ((128, 32, 4, True), (64, 64, 4, True), (64, 32, 4, True)),
    128: ((128, 32, 4, False), (64, 64, 4, False), (64, 32, 4, False)),
}


def backward(run, do, q, k, v, o, lse, dq, dk, dv, scale, offset):
    """Launch Algorithm 2; row i sees the first i + 1 + offset keys, of the tiles in run.tiles."""
    (batch, heads, n_q, _), (_, kv_heads, n_k, _) = q.shape, k.shape
    D = 16 * cdiv(max(q.shape[3], v.shape[3]), 16)
    half, sparse, columns = run.dtype, run.tiles is not None, 64 if D <= 64 else 128
    long_first = offset < n_k  # causal: an offset of n_k hides nothing
    rules = (scale * LOG2_E, scale, offset, int(long_first))

    def best(own, table, make, *more):
        options = [run.blocks[own]] if run.blocks else table[columns]
        if sparse:
            options = run.tiles.fitting(options, own)
        return run.first_that_fits([make(D, half, *x, *more, sparse) for x in options])

    def for_these_keys(D, half, BC, *more):
        return keys_kernel(D, half, BC, *more, n_k % BC > 0)

    def launch(kernel, own, n, n_heads, *arrays):
        grid = grid_of(long_first, cdiv(n, kernel.rows), n_heads, batch)
        lists = run.lists(own, kernel.columns) if sparse else ()
        run(kernel, grid, do, q, k, v, numbers, *arrays, *rules, *lists)

    numbers = run.empty((batch, heads, n_q, 2))
    if run.deterministic:
        kernel = numbers_kernel(D, half, 0)
        run(kernel, (cdiv(n_q, kernel.rows), heads, batch), do, o, lse, numbers, numbers)
        launch(best("keys", KEYS, keys_kernel, 0), "keys", n_k, kv_heads, numbers, dk, dv)
        launch(best("queries", QUERIES, queries_kernel), "queries", n_q, heads, dq)
    else:
        add_dq = 4 if run.capability >= (9, 0) else 1
        keys = best("keys", ONE_PASS, for_these_keys, add_dq)
        # the last tile may begin with the last rows that are there, and is added as a whole
        rows = 16 * cdiv(n_q, 16)
        sums = run.empty((batch, heads, rows + keys.columns - 16, row_bytes(D) // 2))
        kernel = numbers_kernel(D, half, add_dq)
        run(kernel, (cdiv(rows, kernel.rows), heads, batch), do, o, lse, numbers, sums)
        launch(keys, "keys", n_k, kv_heads, sums, dk, dv)
        kernel = rounding_kernel(D, half, add_dq)
        run(kernel, (cdiv(rows, kernel.rows), heads, batch), sums, dq, scale)


@functools.cache
def numbers_kernel(D, half, add_dq, WARPS=4):
    """Return the kernel for L · log2 e and D of each query, and zeros where dQ will be added up."""
    function = numbers_function(D, half, WARPS, add_dq, inline)
    arguments = (HALF_4D, HALF_4D, F32_3D, F32_4D, F32_4D)
    return Kernel(function, arguments, threads=32 * WARPS, rows=32 * WARPS * 16 // row_bytes(D))


@functools.cache
def keys_kernel(D, half, BC, BR, WARPS, IN_REGISTERS, SPLIT, add_dq, sparse=False, tail=False):
    """Return the kernel for dK, dV of BC keys a block, over tiles of BR queries; and for dQ.

    With tail, the last block may reach beyond the keys.
    """
    function = keys_function(
        D, half, BC, BR, WARPS, IN_REGISTERS, SPLIT, add_dq, sparse, tail, inline
    )  # fmt: skip
    tiles_of_S = 2 if SPLIT > 1 else int(add_dq > 0)  # P and dS, or dS
    more_bytes = 2 * 8 * BR + tiles_of_S * BC * row_bytes(BR)
    return _described(function, D, BC, BR, WARPS, [F32_4D, HALF_4D, HALF_4D], more_bytes, sparse)


@functools.cache
def queries_kernel(D, half, BR, BC, WARPS, IN_REGISTERS, sparse=False):
    """Return the kernel for dQ of BR queries a block, over tiles of BC keys."""
    function = queries_function(D, half, BR, BC, WARPS, IN_REGISTERS, sparse, inline)
    return _described(function, D, BR, BC, WARPS, [HALF_4D], 0, sparse)


def _described(function, D, OWN, OTHER, WARPS, results, more_bytes, sparse):
    """Return the kernel: two tiles that stay, two of now and two of next, and what is more."""
    arguments = (*[HALF_4D] * 4, F32_4D, *results, F32, F32, I32, I32)
    return Kernel(
        function, (*arguments, *TILE_LISTS * sparse), threads=32 * WARPS,
        shared_bytes=(2 * OWN + 4 * OTHER) * row_bytes(D) + more_bytes,
        rows=OWN, columns=OTHER, name=f"{OWN} × {OTHER}",
    )  # fmt: skip


@functools.cache
def rounding_kernel(D, half, add_dq, WARPS=4):
    """Return the kernel that makes dQ of its sums."""
    function = rounding_function(D, half, WARPS, add_dq, inline)
    rows = 32 * WARPS * 32 // row_bytes(D)  # a thread has 8 columns of two rows
    return Kernel(function, (F32_4D, HALF_4D, F32), threads=32 * WARPS, rows=rows)


def numbers_function(D, half, WARPS, ADD_DQ, inline):
    """Return the kernel as a Python function: a row of dO and O to LANES lanes, 16 bytes each."""
    LANES = row_bytes(D) // 16
    ROWS = 32 * WARPS // LANES
    head_of = tile_functions(D, half, 1, WARPS, inline).head_of
    unpack = ptx.unpack_f16 if half == "float16" else ptx.unpack_bf16

    def backward_numbers(do, o, lse, numbers, sums):
        block, h, b = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
        n_q, d_v = int32(do.shape[2]), int32(do.shape[3])
        thread = int32(cuda.threadIdx.x)
        lane, i = thread % LANES, int32(block * ROWS + thread // LANES)
        # lane * 8 < d_v and i < n_q, in two instructions: `and` would be a branch
        inside = int32(cuda.selp(lane * 8 < d_v, i, n_q) < n_q)
        do_head = head_of(do, b, h)
        o_head = head_of(o, b, h)
        here = uint64(int64(i) * do.strides[2] + lane * 16)
        x = ptx.load_b32x4(do_head + here, inside)
        y = ptx.load_b32x4(o_head + uint64(int64(i) * o.strides[2] + lane * 16), inside)
        total = float32(0)
        for e in range(4):
            (x0, x1), (y0, y1) = unpack(x[e]), unpack(y[e])
            total += x0 * y0 + x1 * y1
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1)
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 2)
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 4)
        if LANES == 16:
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 8)
        first_lane = int32(cuda.selp(lane == 0, i, n_q) < n_q)
        lse_head = head_of(lse, b, h)
        L = ptx.load_f32(lse_head + uint64(int64(i) * lse.strides[2]), first_lane)
        head = head_of(numbers, b, h)
        to = head + uint64(int64(i) * 8)
        ptx.store_f32(to, L * float32(LOG2_E), first_lane)
        ptx.store_f32(to + uint64(4), total, first_lane)

        if ADD_DQ:  # no thread adds before this kernel is done
            here = head_of(sums, b, h) + uint64((int64(i) * LANES + lane) * 32)
            zero, inside = float32(0), int32(i < sums.shape[2])
            ptx.store_f32x4(here, zero, zero, zero, zero, inside)
            ptx.store_f32x4(here + uint64(16), zero, zero, zero, zero, inside)

    return backward_numbers


def keys_function(D, half, BC, BR, WARPS, IN_REGISTERS, SPLIT, ADD_DQ, SPARSE, TAIL, inline):
    """Return the pass over keys as a Python function; `inline` decorates its device functions.

    With ADD_DQ, it adds up dQ too: so many floats in one instruction, 1 or 4. With TAIL, keys may
    be missing in the last block, and add nothing to dQ.
    """
    ROW = row_bytes(D)
    Q_WARPS = warps_along_rows(BR // 16, ROW // 32, WARPS)  # of dQ
    divided = BC * SPLIT % (16 * WARPS) == 0 and BR % (16 * SPLIT) == 0 and SPLIT in (1, 2)
    if SPLIT > 1 or ADD_DQ:  # dS lies in a tile, where the swizzle wants rows of a power of two
        divided = divided and BR in (16, 32, 64, 128)
    if not (divided and fits(D, WARPS, BC, BR) and BR <= 32 * WARPS and (Q_WARPS or not ADD_DQ)):
        raise ValueError(f"blocks of {BC} × {BR} do not fit {WARPS} warps at {D} columns")
    MT = BC * SPLIT // (16 * WARPS)  # 16-row tiles of a warp
    MINE = BR // SPLIT  # queries of a tile for whom a warp computes P and dS
    OWN, TILE = BC * ROW, BR * ROW  # bytes
    STAGE = 2 * TILE + 8 * BR  # Q, dO, and their numbers
    S_TILES = MINE // 8
    # pairs of 8 columns of dK and dV that a warp owns: half of all that a row has room for, where
    # two share it, since `row_of` wants powers of two
    PAIRS = D // 16 if SPLIT == 1 else ROW // 64
    Q_ROWS, Q_PAIRS = BR // 16 // (Q_WARPS or 1), ROW // 32 * Q_WARPS // WARPS  # the same of dQ
    N_S, N_ACC, N_OWN, N_A = MT * S_TILES * 4, MT * PAIRS * 8, MT * D // 4, max(MT, Q_ROWS) * 4
    N_P, N_DQ = N_S // 2, Q_ROWS * Q_PAIRS * 8
    f = tile_functions(D, half, MT, WARPS, inline, ROWS_LAST=True)
    load_rows, block_of, head_of, keys_seen = f.load_rows, f.block_of, f.head_of, f.keys_seen
    copy_keys, copy_rows = f.copier(BC), f.copier(BR, SINCE=True)
    products = f.rows_by_rows(MINE, IN_REGISTERS)  # Sᵀ = K_j Q_iᵀ, dPᵀ = V_j dO_iᵀ
    store_rows = tile_functions(16 * PAIRS, half, MT, WARPS, inline).store_rows
    # dV += Pᵀ dO_i, dK += dSᵀ Q_i over the warp's own queries
    round_fragments = f.rounder(MINE)
    add_mine = f.add_by_columns(MINE, MT, PAIRS, f.rounded_step(MINE))
    # and over those of the other warp, whose Pᵀ and dSᵀ lie in tiles of keys × queries
    in_S = tile_functions(BR, half, MT, WARPS, inline, ROWS_LAST=True)
    S_TILE = BC * row_bytes(BR)
    store_fragments = in_S.storer(MINE)
    add_other = f.add_by_columns(MINE, MT, PAIRS, in_S.load_step)
    # dQ_i = dS K_j over all keys of the block
    add_dq = f.add_by_columns(BC, Q_ROWS, Q_PAIRS, in_S.turned_step(Q_ROWS))
    add4 = ptx.add_f32x4 if ADD_DQ == 4 else ptx.add_f32_128_apart

    @inline
    def first_query(e, since, begin, starts):
        """Return the first query of tile e, a multiple of 16: dQ's sums lie in fragments of 16."""
        return int32(starts[begin + e] if SPARSE else (since & -16) + e * BR)

    @inline
    def fetch(stage, q_head, q_stride, d, do_head, do_stride, d_v, n_head, start, since, n_q):
        """Start copying Q, dO, L and D of a tile; zeros from n_q on.

        Before `since`, zeros of Q and dO alone: `hide` drops what L and D make of them.
        """
        thread = int32(cuda.threadIdx.x)
        size = uint32(cuda.selp(start + thread < n_q, 8, 0))
        there = n_head + uint64((int64(start) + thread) * 8)
        ptx.copy8(uint32(stage + 2 * TILE + thread * 8), there, size, int32(thread < BR))
        copy_rows(stage, q_head, q_stride, start, n_q, d, since)
        copy_rows(uint32(stage + TILE), do_head, do_stride, start, n_q, d_v, since)

    @inline
    def gradients(S, dP, numbers, scale2):
        """P = 2^(scale S - L) in place of S, and dS = P ∘ (dP - D) in place of dP (lines 11, 14).

        A thread has the columns 2 t and 2 t + 1 of each tile: two queries.
        """
        lane = int32(cuda.threadIdx.x) & 31
        for tile in range(S_TILES):
            L0, D0, L1, D1 = ptx.load_shared4(uint32(numbers + tile * 64 + (lane & 3) * 16))
            for mt in range(MT):
                for half_tile in range(2):
                    x = (mt * S_TILES + tile) * 4 + 2 * half_tile
                    S[x] = ptx.exp2(S[x] * scale2 - L0)
                    S[x + 1] = ptx.exp2(S[x + 1] * scale2 - L1)
                    dP[x] = S[x] * (dP[x] - D0)
                    dP[x + 1] = S[x + 1] * (dP[x + 1] - D1)

    @inline
    def hide(P, dS, ahead):
        """Put 0 where the query does not see the key, as it comes before key - offset.

        Of the warp's queries c and keys r, c sees r from c = ahead + r on. Nobody needs to
        hide queries that are none: their dO is 0, so dP, D and dS are, and what P they have adds 0.
        """
        lane = int32(cuda.threadIdx.x) & 31
        least = int32(ahead + (lane >> 2) - (lane & 3) * 2)  # the same for key g and query 2 t
        for mt in range(MT):
            for half_tile in range(2):  # a thread has rows g and g + 8 of each tile
                for tile in range(S_TILES):
                    x = (mt * S_TILES + tile) * 4 + 2 * half_tile
                    for e in range(2):
                        seen = tile * 8 + e - mt * 16 - half_tile * 8 >= least
                        P[x + e] = cuda.selp(seen, P[x + e], float32(0))
                        dS[x + e] = cuda.selp(seen, dS[x + e], float32(0))

    @inline
    def drop_missing(dS, keys):
        """Put 0 from so many of the warp's keys on.

        K is 0 there, and so is the score; but where all others are far below, as L is, P overflows,
        and what dS then is, NaN or infinite, is no 0 when K's zeros are multiplied by it.
        """
        lane = int32(cuda.threadIdx.x) & 31
        for mt in range(MT):
            for half_tile in range(2):
                there = (lane >> 2) + mt * 16 + half_tile * 8 < keys
                for tile in range(S_TILES):
                    x = (mt * S_TILES + tile) * 4 + 2 * half_tile
                    for e in range(2):
                        dS[x + e] = cuda.selp(there, dS[x + e], float32(0))

    @inline
    def send_dq(to, dS_ij, K_j, A):
        """dQ_i = dS K_j goes to the sums of this tile, from `to` on, fragment by fragment.

        A fragment takes 512 bytes, as `rounding_function` says, a row of fragments 32 ROW.
        """
        thread = int32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> 5), thread & 31  # unsigned numbers are divided by shifts
        row, pair = warp % Q_WARPS * Q_ROWS, warp // Q_WARPS * Q_PAIRS  # this warp's piece
        dQ = cuda.local.array(N_DQ, float32)
        for x in range(N_DQ):
            dQ[x] = float32(0)
        add_dq(dQ, (dS_ij, row * 2), A, K_j, pair)
        here = to + uint64(row * (32 * ROW) + pair * 1024 + lane * (4 * ADD_DQ))
        for mt in range(Q_ROWS):
            for n in range(2 * Q_PAIRS):
                x = (mt * 2 * Q_PAIRS + n) * 4
                there = here + uint64(mt * (32 * ROW) + n * 512)
                add4(there, dQ[x], dQ[x + 1], dQ[x + 2], dQ[x + 3])

    @inline
    def attend(
        do, q, k, v, numbers, sums, dk, dv, scale2, scale, offset, long_first, first_of, starts,
        block_k,
    ):  # fmt: skip
        block, kv_head, b = block_of(long_first, False)  # the first keys are seen by most
        n_q, n_k = int32(q.shape[2]), int32(k.shape[2])
        d, d_v = int32(q.shape[3]), int32(v.shape[3])
        group = int32(q.shape[1]) // int32(k.shape[1])
        h = kv_head * group  # the first of the heads that share the keys
        k_head, v_head = head_of(k, b, kv_head), head_of(v, b, kv_head)
        q_head, do_head = head_of(q, b, h), head_of(do, b, h)
        n_head, s_head = head_of(numbers, b, h), head_of(sums, b, h)
        q_step, do_step = q.strides[1], do.strides[1]  # to the next head
        n_step, s_step = numbers.strides[1], sums.strides[1]

        first = int32(block * BC)
        since = int32(first - offset if first - offset > 0 else 0)  # the first query to look here
        if SPARSE:
            begin, after = first_of[first // block_k], first_of[first // block_k + 1]
            while begin < after and starts[begin] + BR <= since:
                begin += 1
            tiles = int32(after - begin)
            last = starts[after - 1] + BR - 1 if begin < after else -1
            last = int32(n_q - 1 if last >= n_q else last)
        else:
            begin, last = 0, n_q - 1
            tiles = int32((n_q - (since & -16) + BR - 1) // BR if n_q > since else 0)
        stop = keys_seen(last, n_k, offset)  # from here on nobody looks

        # this warp's rows of the block, its queries of a tile, and its columns of dK and dV
        warp = int32(cuda.threadIdx.x) >> 5
        row, mine = int32(warp // SPLIT * (16 * MT)), int32(warp % SPLIT * MINE)
        other, pair = int32(BR - MINE - mine), int32(warp % SPLIT * PAIRS)

        K_j = ptx.shared_address(cuda.shared.array(0, uint32))
        V_j = uint32(K_j + OWN)
        stages = uint32(V_j + OWN)
        dS_ij = uint32(stages + 2 * STAGE)
        P_ij = uint32(dS_ij + S_TILE)
        dK = cuda.local.array(N_ACC, float32)
        dV = cuda.local.array(N_ACC, float32)
        S = cuda.local.array(N_S, float32)
        dP = cuda.local.array(N_S, float32)
        K = cuda.local.array(N_OWN, uint32)
        V = cuda.local.array(N_OWN, uint32)
        A = cuda.local.array(N_A, uint32)  # the products' own
        P = cuda.local.array(N_P, uint32)  # rounded
        dS = cuda.local.array(N_P, uint32)
        for x in range(N_ACC):
            dK[x] = float32(0)
            dV[x] = float32(0)

        # from `stop` on come zeros: lest a NaN there meet a weight of 0
        copy_keys(K_j, k_head, k.strides[2], first, stop, d)
        copy_keys(V_j, v_head, v.strides[2], first, stop, d_v)
        g, e, start = int32(0), int32(0), int32(0)  # what was fetched last: head, tile, query
        if tiles > 0:
            start = first_query(0, since, begin, starts)
            fetch(
                stages, q_head, q.strides[2], d, do_head, do.strides[2], d_v, n_head, start, since,
                n_q,
            )  # fmt: skip
        if IN_REGISTERS:
            ptx.copy_wait()
            cuda.syncthreads()
            for step in range(D // 16):
                load_rows(K, K_j, row, step)
                load_rows(V, V_j, row, step)
        for n in range(int32(tiles * group)):  # line 7, for each head of the group
            # of this tile, before `start` moves on to the next
            ahead = int32(first - offset - start)
            to = s_head + uint64(g * s_step + int64(start) * (2 * ROW))  # this tile's sums
            ptx.copy_wait()  # this tile is here, and all warps are done with the last one
            cuda.syncthreads()
            e = int32(e + 1)
            if e == tiles:
                e, g = int32(0), int32(g + 1)
            if g < group:  # the next tile may take the last one's place
                start = first_query(e, since, begin, starts)
                fetch(
                    uint32(stages + ((n + 1) & 1) * STAGE), q_head + uint64(g * q_step),
                    q.strides[2], d, do_head + uint64(g * do_step), do.strides[2], d_v,
                    n_head + uint64(g * n_step), start, since, n_q,
                )  # fmt: skip
            Q_i = uint32(stages + (n & 1) * STAGE)
            Q_mine = uint32(Q_i + mine * ROW)
            products(S, K, K_j, Q_mine, row)
            products(dP, V, V_j, uint32(Q_mine + TILE), row)
            gradients(S, dP, uint32(Q_i + 2 * TILE + mine * 8), scale2)
            if ahead + BC > 1:  # the diagonal passes through this tile
                hide(S, dP, ahead + row - mine)
            if TAIL:
                if first + BC > n_k:
                    drop_missing(dP, int32(n_k - first - row))
            round_fragments(P, S)
            round_fragments(dS, dP)
            if SPLIT > 1:
                store_fragments(P, P_ij, row, mine // 8)
            if SPLIT > 1 or ADD_DQ:
                store_fragments(dS, dS_ij, row, mine // 8)
            add_mine(dV, P, A, uint32(Q_mine + TILE), pair)  # line 12
            if SPLIT > 1 or ADD_DQ:  # the other warps' P and dS are here
                cuda.syncthreads()
            add_mine(dK, dS, A, Q_mine, pair)  # line 16
            if SPLIT > 1:
                Q_other = uint32(Q_i + other * ROW)
                add_other(dV, (P_ij, row, other // 8), A, uint32(Q_other + TILE), pair)
                add_other(dK, (dS_ij, row, other // 8), A, Q_other, pair)
            if ADD_DQ:
                send_dq(to, dS_ij, K_j, A)  # line 15
        # `head_of` written out: called here, it makes the compiler order the start otherwise
        dk_head = ptx.global_address(dk) + uint64(b * dk.strides[0] + kv_head * dk.strides[1])
        dv_head = ptx.global_address(dv) + uint64(b * dv.strides[0] + kv_head * dv.strides[1])
        dk_head, dv_head = dk_head + uint64(pair * 32), dv_head + uint64(pair * 32)
        store_rows(dK, scale, dk_head, dk.strides[2], first + row, n_k, d - pair * 16)
        store_rows(dV, float32(1), dv_head, dv.strides[2], first + row, n_k, d_v - pair * 16)

    def backward_keys(do, q, k, v, numbers, sums, dk, dv, scale2, scale, offset, long_first):
        attend(
            do, q, k, v, numbers, sums, dk, dv, scale2, scale, offset, long_first, None, None, 0
        )  # fmt: skip

    def backward_keys_sparse(
        do, q, k, v, numbers, sums, dk, dv, scale2, scale, offset, long_first, first_of, starts,
        block_k,
    ):  # fmt: skip
        attend(
            do, q, k, v, numbers, sums, dk, dv, scale2, scale, offset, long_first, first_of, starts,
            block_k,
        )  # fmt: skip

    return backward_keys_sparse if SPARSE else backward_keys


def warps_along_rows(ROWS, PAIRS, WARPS):
    """Return how many of a block's warps share the rows of dQ, ROWS tiles of 16; 0 if none can.

    The others share its columns, PAIRS pairs of 8. A warp loads its rows of dS and its columns of
    K: the squarer its piece, the less it loads for each product.
    """
    fitting = [
        n for n in (1, 2, 4, 8) if ROWS % n == 0 and WARPS % n == 0 and PAIRS * n % WARPS == 0
    ]
    return min(fitting, key=lambda n: ROWS // n + PAIRS * n // WARPS, default=0)


def queries_function(D, half, BR, BC, WARPS, IN_REGISTERS, SPARSE, inline):
    """Return the pass over queries as a Python function; `inline` decorates its device functions.

    The walk is that of the forward pass.
    """
    if BR % (16 * WARPS) or not fits(D, WARPS, BR, BC):
        raise ValueError(f"blocks of {BR} × {BC} do not fit {WARPS} warps at {D} columns")
    MT = BR // (16 * WARPS)
    ROW = row_bytes(D)
    OWN, TILE = BR * ROW, BC * ROW
    S_TILES = BC // 8
    N_S, N_ACC, N_OWN, N_A, N_ROWS = MT * S_TILES * 4, MT * D // 2, MT * D // 4, MT * 4, MT * 2
    NEXT = 1 if SPARSE else BC  # the loop counts places in a list of tiles, or keys
    f = tile_functions(D, half, MT, WARPS, inline)
    load_rows, store_rows, block_of, head_of = f.load_rows, f.store_rows, f.block_of, f.head_of
    keys_seen, drop_unseen = f.keys_seen, f.drop_unseen
    copy_rows, copy_keys = f.copier(BR), f.copier(BC)
    products = f.rows_by_rows(BC, IN_REGISTERS)  # S = Q_i K_jᵀ, dP = dO_i V_jᵀ
    add_product = f.add_rows_by_columns(BC)  # dQ += dS K_j

    @inline
    def gradients(S, dP, L, D_i, scale2):
        """P = 2^(scale S - L) in place of S, and dS = P ∘ (dP - D) in place of dP."""
        for row in range(N_ROWS):
            mt, e = row // 2, 2 * (row % 2)
            for tile in range(S_TILES):
                x = (mt * S_TILES + tile) * 4 + e
                S[x] = ptx.exp2(S[x] * scale2 - L[row])
                S[x + 1] = ptx.exp2(S[x + 1] * scale2 - L[row])
                dP[x] = S[x] * (dP[x] - D_i[row])
                dP[x + 1] = S[x + 1] * (dP[x + 1] - D_i[row])

    @inline
    def hide(dS, start, first_row, n_k, offset):
        """Put 0 where a row of this warp does not see the key, and where there is none."""
        lane = int32(cuda.threadIdx.x) & 31
        for row in range(N_ROWS):
            mt, e = row // 2, 2 * (row % 2)
            sees = int32(first_row + mt * 16 + (lane >> 2) + 8 * (row % 2) + 1 + offset)
            limit = cuda.selp(sees > n_k, n_k, sees) - start - (lane & 3) * 2
            for tile in range(S_TILES):
                x = (mt * S_TILES + tile) * 4 + e
                dS[x] = cuda.selp(tile * 8 < limit, dS[x], float32(0))
                dS[x + 1] = cuda.selp(tile * 8 + 1 < limit, dS[x + 1], float32(0))

    @inline
    def attend(
        do, q, k, v, numbers, dq, scale2, scale, offset, long_first, first_of, starts, block_q
    ):  # fmt: skip
        block, h, b = block_of(long_first, True)  # the last queries see most
        n_q, n_k = int32(q.shape[2]), int32(k.shape[2])
        d, d_v = int32(q.shape[3]), int32(v.shape[3])
        kv_head = h // (int32(q.shape[1]) // int32(k.shape[1]))
        q_head, do_head = head_of(q, b, h), head_of(do, b, h)
        k_head, v_head = head_of(k, b, kv_head), head_of(v, b, kv_head)
        n_head = head_of(numbers, b, h)

        first = block * BR
        end = n_q if first + BR > n_q else first + BR
        # no row of the block sees a key from `stop` on, and every row sees those before `full`
        stop, full = keys_seen(end - 1, n_k, offset), keys_seen(first, n_k, offset)
        row = (int32(cuda.threadIdx.x) >> 5) * (16 * MT)

        Q_i = ptx.shared_address(cuda.shared.array(0, uint32))
        dO_i = uint32(Q_i + OWN)
        stages = uint32(dO_i + OWN)
        dQ = cuda.local.array(N_ACC, float32)
        S = cuda.local.array(N_S, float32)
        dP = cuda.local.array(N_S, float32)
        Q = cuda.local.array(N_OWN, uint32)
        dO = cuda.local.array(N_OWN, uint32)
        A = cuda.local.array(N_A, uint32)  # add_product's own
        L = cuda.local.array(N_ROWS, float32)
        D_i = cuda.local.array(N_ROWS, float32)
        lane = int32(cuda.threadIdx.x) & 31
        for x in range(N_ROWS):
            i = int32(first + row + (x // 2) * 16 + (lane >> 2) + 8 * (x % 2))
            L[x], D_i[x] = ptx.load_f32x2(n_head + uint64(int64(i) * 8), int32(i < n_q))
        for x in range(N_ACC):
            dQ[x] = float32(0)

        if SPARSE:  # the places of this block's tiles in the list of all (`block_mask`)
            begin, after = first_of[first // block_q], first_of[first // block_q + 1]
            after = drop_unseen(starts, begin, after, stop)
            stop = stop if begin < after else 0  # no tile: nothing to load
            start = starts[begin] if begin < after else 0
        else:
            begin, after, start = 0, stop, 0
        copy_rows(Q_i, q_head, q.strides[2], first, n_q, d)
        copy_rows(dO_i, do_head, do.strides[2], first, n_q, d_v)
        # from `stop` on nobody here looks: zeros, lest a NaN there meet a weight of 0
        K_j = uint32(stages + (begin // NEXT & 1) * (2 * TILE))
        copy_keys(K_j, k_head, k.strides[2], start, stop, d)
        copy_keys(uint32(K_j + TILE), v_head, v.strides[2], start, stop, d_v)
        if IN_REGISTERS:
            ptx.copy_wait()
            cuda.syncthreads()
            for step in range(D // 16):
                load_rows(Q, Q_i, row, step)
                load_rows(dO, dO_i, row, step)
        for n in range(begin, after, NEXT):
            start = starts[n] if SPARSE else n
            K_j = uint32(stages + (n // NEXT & 1) * (2 * TILE))
            V_j = uint32(K_j + TILE)
            ptx.copy_wait()  # this tile is here, and all warps are done with the last one
            cuda.syncthreads()
            if n + NEXT < after:  # whose place the next one may take
                then = starts[n + 1] if SPARSE else n + BC
                K_next = uint32(stages + ((n // NEXT + 1) & 1) * (2 * TILE))
                copy_keys(K_next, k_head, k.strides[2], then, stop, d)
                copy_keys(uint32(K_next + TILE), v_head, v.strides[2], then, stop, d_v)
            products(S, Q, Q_i, K_j, row)
            products(dP, dO, dO_i, V_j, row)
            gradients(S, dP, L, D_i, scale2)
            if start + BC > full:  # the diagonal or the tail passes through this tile
                hide(dP, start, first + row, n_k, offset)
            add_product(dQ, dP, A, K_j)  # line 15
        dq_head = head_of(dq, b, h)
        store_rows(dQ, scale, dq_head, dq.strides[2], first + row, n_q, d)

    def backward_queries(do, q, k, v, numbers, dq, scale2, scale, offset, long_first):
        attend(do, q, k, v, numbers, dq, scale2, scale, offset, long_first, None, None, 0)

    def backward_queries_sparse(
        do, q, k, v, numbers, dq, scale2, scale, offset, long_first, first_of, starts, block_q
    ):  # fmt: skip
        attend(
            do, q, k, v, numbers, dq, scale2, scale, offset, long_first, first_of, starts, block_q
        )  # fmt: skip

    return backward_queries_sparse if SPARSE else backward_queries


def rounding_function(D, half, WARPS, ADD_DQ, inline):
    """Return the kernel that makes dQ of its sums, times scale, as a Python function.

    The sums lie as threads have them: the 16 × 8 numbers of a C fragment side by side, 512 bytes,
    the 4 of a thread too (ADD_DQ = 4), or each in its place among the 32 of the warp (1). Here a
    thread has rows g and g + 8 of a fragment.
    """
    FRAGMENTS = row_bytes(D) // 16  # side by side
    head_of = tile_functions(D, half, 1, WARPS, inline).head_of
    pack = ptx.pack_f16 if half == "float16" else ptx.pack_bf16

    def backward_rounding(sums, dq, scale):
        h, b = int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
        n_q, d = int32(dq.shape[2]), int32(dq.shape[3])
        thread = int32(cuda.blockIdx.x) * (32 * WARPS) + int32(cuda.threadIdx.x)
        fragment, g = thread // 8, thread % 8
        i, c = int32(fragment // FRAGMENTS * 16 + g), fragment % FRAGMENTS * 8
        here = head_of(sums, b, h) + uint64(int64(fragment) * 512 + g * (16 * ADD_DQ))
        to = head_of(dq, b, h) + uint64(int64(i) * dq.strides[2] + c * 2)
        x = cuda.local.array(16, float32)  # x[4 t + e]: number e of lane t of row g
        for n in range(4):
            there = here + uint64(n * (16 if ADD_DQ == 4 else 128))
            numbers = ptx.load_f32x4(there, int32(i < n_q))
            for m in range(4):
                x[4 * n + m if ADD_DQ == 4 else 4 * m + n] = numbers[m] * scale
        for half_tile in range(2):
            row = int32(i + 8 * half_tile)
            e = 2 * half_tile
            # c < d and row < n_q, in two instructions: `and` would be a branch
            inside = int32(cuda.selp(c < d, row, n_q) < n_q)
            ptx.store_b32x4(
                to + uint64(8 * half_tile * dq.strides[2]), pack(x[e], x[e + 1]),
                pack(x[e + 4], x[e + 5]), pack(x[e + 8], x[e + 9]), pack(x[e + 12], x[e + 13]),
                inside,
            )  # fmt: skip

    return backward_rounding
