"""The backward pass on tensor cores: Algorithm 2 as two passes, one over keys and one over queries.

A block of the first pass owns keys: its warps keep dK and dV of their rows in registers while the
queries pass by. A block of the second owns queries and keeps dQ while the keys pass by. Both
compute P again from lse, and dP = dO Vᵀ, with the tiles and fragments of the forward pass. The
first computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, not S and dP: then a warp's rows of P and dS are rows of
dV = Pᵀ dO and dK = dSᵀ Q, and both are A fragments of these products as they lie in the registers.
Nothing of size n_q × n_k, not even a tile of it, is written to any memory. A kernel before both
leaves L · log2 e and D = rowsum(dO ∘ O) side by side, so that one load brings what two scores need.
What it costs: dK and dV of 16 keys are D numbers a thread, and a tile of Sᵀ and dPᵀ comes on top:
nearly all 255 registers at D = 128. Shared memory: K, V of the keys, and Q, dO of this tile and of
the next, 129 KiB at D = 128; the other way round in the second pass, 96 KiB. Device memory: 8 bytes
for each query of each head.
What is bad about it: 7 products where 5 would do, since S and dP are computed twice; in return each
sum has one order and equal calls give equal bits, where one pass would have its blocks add to dQ
in whatever order they come. P and dS are rounded to halves before the products that sum them up;
a dS beyond 65504 is infinite in float16.
"""

import functools

from numba import cuda, float32, int32, int64, uint32, uint64

from flashref.cuda import ptx
from flashref.cuda.fragments import LOG2_E, fits, grid_of, row_bytes, tile_functions
from flashref.cuda.launch import F32, F32_3D, F32_4D, HALF_4D, I32, TILE_LISTS, Kernel, cdiv, inline

KEYS = {  # most columns: (keys owned, queries of a tile, warps, K and V in registers), best first
    64: ((128, 32, 4, False), (64, 64, 4, True), (64, 32, 4, True)),
    128: ((128, 64, 8, False), (64, 64, 4, False), (64, 32, 4, False)),
}
QUERIES = {  # most columns: (queries owned, keys of a tile, warps, Q and dO in registers)
    64: ((128, 32, 4, True), (64, 64, 4, True), (64, 32, 4, True)),
    128: ((128, 32, 4, False), (64, 64, 4, False), (64, 32, 4, False)),
}
# Not measured yet: chosen so that a warp reads as little shared memory for each product as its
# registers allow. At D = 128 dK and dV leave a warp only 16 rows, and reading takes longest.


def backward(run, do, q, k, v, o, lse, dq, dk, dv, scale, offset):
    """Launch Algorithm 2; row i sees the first i + 1 + offset keys, of the tiles in run.tiles."""
    (batch, heads, n_q, _), (_, kv_heads, n_k, _) = q.shape, k.shape
    D = 16 * cdiv(max(q.shape[3], v.shape[3]), 16)
    half, sparse = run.dtype, run.tiles is not None
    numbers = run.empty((batch, heads, n_q, 2))
    kernel = numbers_kernel(D, half)
    run(kernel, (cdiv(n_q, kernel.rows), heads, batch), do, o, lse, numbers)
    for own, n, n_heads, table, make, results in (
        ("keys", n_k, kv_heads, KEYS, keys_kernel, (dk, dv)),
        ("queries", n_q, heads, QUERIES, queries_kernel, (dq,)),
    ):
        options = [run.blocks[own]] if run.blocks else table[64 if D <= 64 else 128]
        if sparse:
            options = run.tiles.fitting(options, own)
        kernel = run.first_that_fits([make(D, half, *option, sparse) for option in options])
        long_first = offset < n_k  # causal: an offset of n_k hides nothing
        grid = grid_of(long_first, cdiv(n, kernel.rows), n_heads, batch)
        lists = run.lists(own, kernel.columns) if sparse else ()
        rules = (scale * LOG2_E, scale, offset, int(long_first))
        run(kernel, grid, do, q, k, v, numbers, *results, *rules, *lists)


@functools.cache
def numbers_kernel(D, half, WARPS=4):
    """Return the kernel for L · log2 e and D of each query."""
    function = numbers_function(D, half, WARPS, inline)
    arguments = (HALF_4D, HALF_4D, F32_3D, F32_4D)
    return Kernel(function, arguments, threads=32 * WARPS, rows=32 * WARPS * 16 // row_bytes(D))


@functools.cache
def keys_kernel(D, half, BC, BR, WARPS, IN_REGISTERS, sparse=False):
    """Return the kernel for dK, dV of BC keys a block, over tiles of BR queries."""
    function = keys_function(D, half, BC, BR, WARPS, IN_REGISTERS, sparse, inline)
    return _described(function, D, BC, BR, WARPS, 2, 2 * 8 * BR, sparse)


@functools.cache
def queries_kernel(D, half, BR, BC, WARPS, IN_REGISTERS, sparse=False):
    """Return the kernel for dQ of BR queries a block, over tiles of BC keys."""
    function = queries_function(D, half, BR, BC, WARPS, IN_REGISTERS, sparse, inline)
    return _described(function, D, BR, BC, WARPS, 1, 0, sparse)


def _described(function, D, OWN, OTHER, WARPS, results, more_bytes, sparse):
    """Return the kernel: two tiles that stay, two of now and two of next, and what is more."""
    arguments = (*[HALF_4D] * 4, F32_4D, *[HALF_4D] * results, F32, F32, I32, I32)
    return Kernel(
        function, (*arguments, *TILE_LISTS * sparse), threads=32 * WARPS,
        shared_bytes=(2 * OWN + 4 * OTHER) * row_bytes(D) + more_bytes,
        rows=OWN, columns=OTHER, name=f"{OWN} × {OTHER}",
    )  # fmt: skip


def numbers_function(D, half, WARPS, inline):
    """Return the kernel as a Python function: a row of dO and O to LANES lanes, 16 bytes each."""
    LANES = row_bytes(D) // 16
    ROWS = 32 * WARPS // LANES
    head_of = tile_functions(D, half, 1, WARPS, inline).head_of
    unpack = ptx.unpack_f16 if half == "float16" else ptx.unpack_bf16

    def backward_numbers(do, o, lse, numbers):
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

    return backward_numbers


def keys_function(D, half, BC, BR, WARPS, IN_REGISTERS, SPARSE, inline):
    """Return the pass over keys as a Python function; `inline` decorates its device functions."""
    if BC % (16 * WARPS) or not fits(D, WARPS, BC, BR) or BR > 32 * WARPS:
        raise ValueError(f"blocks of {BC} × {BR} do not fit {WARPS} warps at {D} columns")
    MT = BC // (16 * WARPS)  # 16-row tiles of a warp
    ROW = row_bytes(D)
    OWN, TILE = BC * ROW, BR * ROW  # bytes
    STAGE = 2 * TILE + 8 * BR  # Q, dO, and their numbers
    S_TILES = BR // 8
    N_S, N_ACC, N_OWN, N_A = MT * S_TILES * 4, MT * D // 2, MT * D // 4, MT * 4
    f = tile_functions(D, half, MT, WARPS, inline)
    load_rows, store_rows, block_of, head_of = f.load_rows, f.store_rows, f.block_of, f.head_of
    copy_keys, copy_rows = f.copier(BC), f.copier(BR)
    products = f.rows_by_rows(BR, IN_REGISTERS)  # Sᵀ = K_j Q_iᵀ, dPᵀ = V_j dO_iᵀ
    add_product = f.add_rows_by_columns(BR)  # dV += Pᵀ dO_i, dK += dSᵀ Q_i

    @inline
    def queries_of(e, since, n_q, begin, starts):
        """Return the first query of tile e, and the query after its last."""
        if SPARSE:
            at = int32(starts[begin + e])
            after = n_q if at + BR > n_q else at + BR
            start = since if at < since else at
        else:
            after, start = n_q, since + e * BR
        return start, after

    @inline
    def fetch(stage, q_head, q_stride, d, do_head, do_stride, d_v, n_head, start, after):
        """Start copying Q, dO, L and D of the queries of a tile; beyond `after` come zeros."""
        thread = int32(cuda.threadIdx.x)
        size = uint32(cuda.selp(start + thread < after, 8, 0))
        there = n_head + uint64((int64(start) + thread) * 8)
        ptx.copy8(uint32(stage + 2 * TILE + thread * 8), there, size, int32(thread < BR))
        copy_rows(stage, q_head, q_stride, start, after, d)
        copy_rows(uint32(stage + TILE), do_head, do_stride, start, after, d_v)

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
    def hide(X, start, after, first_row, offset):
        """Put 0 where the query does not see the key, as it comes before key - offset, or is none.

        The rows of K and V may hold anything where no query looks.
        """
        lane = int32(cuda.threadIdx.x) & 31
        for mt in range(MT):
            for half_tile in range(2):  # a thread has rows g and g + 8 of each tile
                key = int32(first_row + mt * 16 + (lane >> 2) + 8 * half_tile)
                least = key - offset - start - (lane & 3) * 2  # this thread's first query: 2 t
                limit = after - start - (lane & 3) * 2
                for tile in range(S_TILES):
                    x = (mt * S_TILES + tile) * 4 + 2 * half_tile
                    for e in range(2):
                        seen = cuda.selp(tile * 8 + e >= least, X[x + e], float32(0))
                        X[x + e] = cuda.selp(tile * 8 + e < limit, seen, float32(0))

    @inline
    def attend(
        do, q, k, v, numbers, dk, dv, scale2, scale, offset, long_first, first_of, starts, block_k
    ):  # fmt: skip
        block, kv_head, b = block_of(long_first, False)  # the first keys are seen by most
        n_q, n_k = int32(q.shape[2]), int32(k.shape[2])
        d, d_v = int32(q.shape[3]), int32(v.shape[3])
        group = int32(q.shape[1]) // int32(k.shape[1])
        h = kv_head * group  # the first of the heads that share the keys
        k_head, v_head = head_of(k, b, kv_head), head_of(v, b, kv_head)
        q_head, do_head = head_of(q, b, h), head_of(do, b, h)
        n_head = head_of(numbers, b, h)

        first = block * BC
        row = (int32(cuda.threadIdx.x) >> 5) * (16 * MT)  # this warp's rows of the block
        since = first - offset if first - offset > 0 else 0  # the first query that looks here
        if SPARSE:
            begin, after = first_of[first // block_k], first_of[first // block_k + 1]
            while begin < after and starts[begin] + BR <= since:
                begin += 1
            tiles = int32(after - begin)
        else:
            begin = 0
            tiles = int32((n_q - since + BR - 1) // BR if n_q > since else 0)

        K_j = ptx.shared_address(cuda.shared.array(0, uint32))
        V_j = uint32(K_j + OWN)
        stages = uint32(V_j + OWN)
        dK = cuda.local.array(N_ACC, float32)
        dV = cuda.local.array(N_ACC, float32)
        S = cuda.local.array(N_S, float32)
        dP = cuda.local.array(N_S, float32)
        K = cuda.local.array(N_OWN, uint32)
        V = cuda.local.array(N_OWN, uint32)
        A = cuda.local.array(N_A, uint32)  # add_product's own
        for x in range(N_ACC):
            dK[x] = float32(0)
            dV[x] = float32(0)

        copy_keys(K_j, k_head, k.strides[2], first, n_k, d)
        copy_keys(V_j, v_head, v.strides[2], first, n_k, d_v)
        q_step, do_step, n_step = q.strides[1], do.strides[1], numbers.strides[1]  # to a next head
        g, e, start, after = 0, 0, 0, 0  # what was fetched last: head, tile of the head, queries
        if tiles > 0:
            start, after = queries_of(0, since, n_q, begin, starts)
            fetch(
                stages, q_head, q.strides[2], d, do_head, do.strides[2], d_v, n_head, start, after
            )  # fmt: skip
        if IN_REGISTERS:
            ptx.copy_wait()
            cuda.syncthreads()
            for step in range(D // 16):
                load_rows(K, K_j, row, step)
                load_rows(V, V_j, row, step)
        for n in range(tiles * group):  # line 7, for each head of the group
            first_query, last = start, after
            ptx.copy_wait()  # this tile is here, and all warps are done with the last one
            cuda.syncthreads()
            e += 1
            if e == tiles:
                e, g = 0, g + 1
            if g < group:  # the next tile may take the last one's place
                start, after = queries_of(e, since, n_q, begin, starts)
                fetch(
                    uint32(stages + ((n + 1) & 1) * STAGE), q_head + uint64(g * q_step),
                    q.strides[2], d, do_head + uint64(g * do_step), do.strides[2], d_v,
                    n_head + uint64(g * n_step), start, after,
                )  # fmt: skip
            Q_i = uint32(stages + (n & 1) * STAGE)
            dO_i = uint32(Q_i + TILE)
            products(S, K, K_j, Q_i, row)
            products(dP, V, V_j, dO_i, row)
            gradients(S, dP, uint32(Q_i + 2 * TILE), scale2)
            # the diagonal passes through this tile, or the tail
            if first + BC - 1 - offset > first_query or first_query + BR > last:
                hide(S, first_query, last, first + row, offset)
                hide(dP, first_query, last, first + row, offset)
            add_product(dV, S, A, dO_i)  # line 12
            add_product(dK, dP, A, Q_i)  # line 16
        # `head_of` written out: called here, it makes the compiler order the start otherwise
        dk_head = ptx.global_address(dk) + uint64(b * dk.strides[0] + kv_head * dk.strides[1])
        dv_head = ptx.global_address(dv) + uint64(b * dv.strides[0] + kv_head * dv.strides[1])
        store_rows(dK, scale, dk_head, dk.strides[2], first + row, n_k, d)
        store_rows(dV, float32(1), dv_head, dv.strides[2], first + row, n_k, d_v)

    def backward_keys(do, q, k, v, numbers, dk, dv, scale2, scale, offset, long_first):
        attend(
            do, q, k, v, numbers, dk, dv, scale2, scale, offset, long_first, None, None, 0
        )  # fmt: skip

    def backward_keys_sparse(
        do, q, k, v, numbers, dk, dv, scale2, scale, offset, long_first, first_of, starts, block_k
    ):  # fmt: skip
        attend(
            do, q, k, v, numbers, dk, dv, scale2, scale, offset, long_first, first_of, starts,
            block_k,
        )  # fmt: skip

    return backward_keys_sparse if SPARSE else backward_keys


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
