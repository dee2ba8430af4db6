"""FlashAttention-3: tensor cores and copies work on by themselves, and warpgroups specialise.

Shah et al. (2024), arXiv:2407.08608; line numbers below are those of its Algorithm 2. Unlike in
`tensor_core`, a product is not over when its instruction is. `wgmma` multiplies 64 rows for four
warps, a warpgroup, which may do other things until it asks for the result. So each starts S of a
tile of keys together with P V of the tile before, waits for S alone, and does its softmax while
P V is under way. One more warpgroup only copies, or rather one thread of it: that asks TMA for
whole tiles, which arrive swizzled, and costs the threads that multiply no instruction and no
register.

    copies         K8 V8 K7 V7 K6                     V6 K5
    warpgroup 1       S8           S7 PV8        S6 PV7        S5 PV6     tensor cores
                         softmax 8    softmax 7     softmax 6             other units
    warpgroup 2       S8                  S7 PV8        S6 PV7            tensor cores
                         softmax 8           softmax 7     softmax 6      other units

Warpgroups take turns ("ping-pong"): 2 may start its products when 1 has started its own, so that
the rest of a softmax, when its own P V is over, falls into the products of the other. The first S
of each tile of queries (S8) has no P V beside it and takes no turn: both start it when K8 is there.
K6 is copied when both have used K8, V6 when both have used V8: there are two buffers of each.
Blocks are persistent: one a multiprocessor, which copies for its next tile of queries while it
stores the last. Tiles of keys come last first, since only the last ones need a mask: the inner loop
has none.

Each step can be switched off, in `Schedule`; `steps` has them in the order of the lesson.

A warpgroup that sees nothing of a tile of keys hands on its buffers, and its turn (`pass_over`);
one tile it always works on, so that the walk is the same for all. A causal walk takes some heads at
a time (`section_for`), so that their K and V are still in the cache when the next rows come.

What it costs, with up to 64, 128, 256 columns: 192, 128, 128 queries a block; 113, 193, 225 KiB of
shared memory (two tiles of Q, or one of 256 columns; K and V of two tiles of 128, 128, 80 keys).
Short sequences (`SHORT`) take 256 queries, 64 keys and 145 KiB with up to 64 columns, and 128, 64
and 193 with up to 128. Registers: those of the block are dealt out anew (`setmaxnreg`, see
`REGISTERS`), 24 or 32 to a thread that copies by TMA, 240, 160 or 112 to one of two, three or four
warpgroups that multiply: (D + BC) / 2 for O and S, BC / 4 for P, the rest for everything else.
What is bad about it: it is bound to one chip (sm_90a), and most of it is protocol. Each tile of
queries starts with an S and a softmax, and ends with a P V, that have nothing of their own
warpgroup beside them: a short sequence, above all a causal one, is mostly starts and ends, and
wants tiles of fewer keys (`SHORT`).

What is hard to see, coming from CUDA C++: an `if` on a constant (`TURNS`), or on an argument that
every caller gives as one (`masked`), is decided at compile time; arrays like S are registers, since
all their indices are constants once loops are unrolled; Numba makes uint32 ± uint32 a uint64, hence
a cast around what is kept (arguments of PTX are cast anyway); `selp(a, x, n) < n` is "a and x < n"
in two instructions, where `and` would be a branch. As far as the compiler knows, what `wgmma` will
bring is in S from the start, and only `wait_scores(S)` keeps its readers behind; each buffer has
two barriers, at which both sides count rounds alone (see `hopper_tiles`). And what looks like taste
is not always: with a predicate in place of the branch in `empty`, the compiler moves the arrival
that gives K's buffer back down into the middle of the softmax, and the next K comes that much
later.
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from flashref.cuda import ptx
from flashref.cuda import ptx_hopper as hx
from flashref.cuda.fragments import LOG2_E
from flashref.cuda.hopper_tiles import LINE, SWIZZLE_BYTES, shared_layout, tile_functions
from flashref.cuda.launch import F32, F32_3D, HALF_4D, I32, MAPS, Kernel, cdiv, inline
from flashref.cuda.tensor_core import LEAST_SCALE, LN_2, MASKED

ALL = 0xFFFFFFFF  # lanes of a warp
# Registers of a thread that copies, and of one that multiplies, by (tma, warpgroups that multiply).
# A block starts with the same for all, 65,536 / threads, rounded down to 8: 384 · 168 = 64,512,
# 512 · 128 = 65,536, 640 · 96 = 61,440. So much there is to deal out, in steps of 8, and each pair
# deals out all of it: 128 (24 + 2 · 240) = 64,512, and so on. Threads that copy keep what they
# need, 24 with TMA (`setmaxnreg` knows no less), else 56, and what the steps leave over. `inc`
# waits until `dec` has given enough: for one step more, for ever
REGISTERS = {
    (True, 2): (24, 240), (True, 3): (32, 160), (True, 4): (32, 112),
    (False, 2): (56, 224), (False, 3): (56, 152), (False, 4): (64, 104),
}  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Who does what when. The switches are the steps from `tensor_core` to here."""

    warpgroups: int  # that multiply, each 64 rows of queries; one more copies
    BC: int  # keys of a tile
    stages: int = 2  # tiles of K, and of V, in shared memory
    query_stages: int = 2  # tiles of Q there
    give_registers: bool = True  # from the threads that copy to those that multiply
    tma: bool = True  # else cp.async, by all threads of the copying warpgroup
    overlap: bool = True  # P V of the tile before starts with S, and goes on during the softmax
    take_turns: bool = True  # with the tensor cores: "ping-pong"
    persistent: bool = True  # a block a multiprocessor, which walks over the tiles of queries

    def __post_init__(self):
        """Refuse what would not compile, or would wait for ever, in words."""
        if self.BC % 16 or not 16 <= self.BC <= 256 or not 1 <= self.warpgroups <= 4:
            raise ValueError(
                f"{self}: BC must be a multiple of 16 from 16 to 256, warpgroups 1 to 4"
            )
        if self.stages < 1 or self.query_stages < 1:
            raise ValueError(f"{self}: stages and query_stages must be at least 1")
        # threads publish K_n after they have started to copy V_n, which takes the buffer of
        # V_(n-1); with overlap, that one is not used before K_n is there
        if self.stages == 1 and self.overlap and not self.tma:
            raise ValueError(f"{self}: stages must be at least 2 with overlap and without tma")


BEST = {  # by columns
    64: Schedule(3, 128), 128: Schedule(2, 128), 256: Schedule(2, 80, query_stages=1),
}  # fmt: skip
SHORT = {  # by columns, and whether some rows do not see all keys: up to so many keys
    (64, False): (1024, Schedule(4, 64, stages=5)), (64, True): (4096, Schedule(4, 64, stages=5)),
    (128, True): (512, Schedule(2, 64, stages=4)),
}  # fmt: skip
STEPS = {  # what each adds to those before it
    "wgmma": (), "registers": ("give_registers",), "TMA": ("tma",), "overlap": ("overlap",),
    "turns": ("take_turns",), "persistent": ("persistent",),
}  # fmt: skip


def schedule_for(D, n_k, hides):
    """Return the fastest schedule known for up to D columns; hides: some rows do not see all keys.

    Measured on an H200: `results` has what they reach, lesson 12 what was tried.
    """
    most, schedule = SHORT.get((D, hides), (-1, None))
    return schedule if n_k <= most else BEST[D]


def steps(D):
    """Return the steps that lead to the best schedule for D columns: name to schedule, in order."""
    on = dict.fromkeys((switch for step in STEPS.values() for switch in step), False)
    found = {}
    for name, added in STEPS.items():
        on |= dict.fromkeys(added, True)
        found[name] = replace(BEST[D], **on)
    return found


def forward(run, q, k, v, o, lse, scale, offset):
    """Launch the kernel; row i sees the keys below i + 1 + offset."""
    n_q, n_k, heads = q.shape[2], k.shape[2], q.shape[0] * q.shape[1]
    if n_q == 0:
        return
    D = next(D for D in BEST if max(q.shape[3], v.shape[3]) <= D)
    # row 0 sees the fewest keys, those below 1 + offset: not all of them? With no keys at all, the
    # one tile is masked as a whole
    hides = 1 + offset < n_k or n_k == 0
    schedule = run.blocks or schedule_for(D, n_k, hides)
    kernel = forward_kernel(D, run.dtype, schedule, hides, scale < 0)
    rows = cdiv(n_q, kernel.rows)
    blocks = min(rows * heads, run.multiprocessors) if schedule.persistent else rows * heads
    section = section_for(rows, heads, blocks) if hides else heads
    # keys that no row sees are not in the maps: zeros arrive, so that a NaN in them meets no weight
    # of 0. One that some row sees can still reach rows that do not see it, of any block that works
    # on its tile: there, 0 · NaN is NaN (the notes of `flash_attention_2` say so)
    seen = max(1, min(n_k, n_q + offset))
    keys, values = (k, v) if n_k else (q, q)  # no keys, no map: q stands in, and all is masked
    maps = run.tensor_maps(
        (q, n_q, kernel.rows), (keys, seen, schedule.BC), (values, seen, schedule.BC)
    )
    scale2 = max(abs(scale) * LOG2_E, LEAST_SCALE)  # of scores in base 2; `negative` has the sign
    run(kernel, (blocks, 1, 1), maps, q, k, v, o, lse, scale2, offset, section)


@functools.lru_cache(1024)
def section_for(rows, heads, blocks):
    """Return how many heads a causal walk takes at a time, each with so many tiles of queries.

    Few enough that their K and V stay in the cache: as many as fill 2, 4, 6, or 8 deals to all
    blocks (`tile_of`). Of these, the smallest number whose busiest block has at most 2 % more to do
    than with the best of them, where tile i of a head takes i + 1 steps.
    """

    def steps_of_blocks(here, turns):
        steps = np.zeros(turns * blocks, int)
        steps[: here * rows] = np.repeat(np.arange(rows, 0, -1), here)
        steps = steps.reshape(turns, blocks)
        return steps[::2].sum(0) + steps[1::2, ::-1].sum(0)

    def busiest(section):
        turns = 2 * cdiv(section * rows, 2 * blocks)
        full, rest = divmod(heads, section)
        return (full * steps_of_blocks(section, turns) + steps_of_blocks(rest, turns)).max()

    fitting = {min(heads, max(1, pairs * 2 * blocks // rows)) for pairs in (1, 2, 3, 4)}
    work = {section: busiest(section) for section in sorted(fitting)}
    return next(section for section in work if work[section] <= 1.02 * min(work.values()))


@functools.cache
def forward_kernel(D, half, schedule, hides, negative):
    """Return the kernel for up to D columns; `hides`: some rows do not see all keys."""
    return Kernel(
        forward_function(D, half, schedule, hides, negative, inline),
        (MAPS, *[HALF_4D] * 4, F32_3D, F32, I32, I32), threads=128 * (schedule.warpgroups + 1),
        shared_bytes=SWIZZLE_BYTES + shared_layout(D, schedule).end, rows=64 * schedule.warpgroups,
        columns=schedule.BC, name=f"{64 * schedule.warpgroups} × {schedule.BC}", per_processor=1,
    )  # fmt: skip


def forward_function(D, half, schedule, HIDES, NEGATIVE, inline):
    """Return the kernel as a Python function; `inline` decorates its device functions."""
    WARPGROUPS, BC, STAGES, TMA = schedule.warpgroups, schedule.BC, schedule.stages, schedule.tma
    BR = 64 * WARPGROUPS
    OVERLAP = schedule.overlap
    QUERY_STAGES = schedule.query_stages
    # one warpgroup that multiplies and one that copies have 255 each anyway
    GIVES = schedule.give_registers and WARPGROUPS > 1
    TURNS = schedule.take_turns and OVERLAP and WARPGROUPS > 1  # one alone would only meet itself
    TURN_THREADS = 256  # of a turn's named barrier: 128 that wait for it, 128 that announce it
    O_TILES, D_STEPS, BC_STEPS = D // 8, D // 16, BC // 16
    N_S, N_O, N_P = BC // 2, D // 2, BC // 4
    FULL_ARRIVALS = 1 if TMA else 128  # one of each thread that copies
    EMPTY_ARRIVALS = 4 * WARPGROUPS  # one of each warp that multiplies
    at = shared_layout(D, schedule)
    K, V, Q_TILE, TILE = at.K, at.V, at.query_tile, at.tile
    FULL_Q, EMPTY_Q, FULL_K, EMPTY_K = at.full_Q, at.empty_Q, at.full_K, at.empty_K
    FULL_V, EMPTY_V = at.full_V, at.empty_V
    f = tile_functions(D, schedule, HIDES, inline)
    tile_of, key_tiles = f.tile_of, f.key_tiles
    next_query, next_buffer = f.next_query, f.next_buffer
    fill_by_tma, fill_by_threads = f.fill_by_tma, f.fill_by_threads
    if GIVES:
        fewer, many = REGISTERS[TMA, WARPGROUPS]
        release_registers = hx.set_registers(fewer, more=False)
        take_registers = hx.set_registers(many, more=True)
    pack = ptx.pack_f16 if half == "float16" else ptx.pack_bf16

    # Q_0, Q_i, K_0, K_j, V_0 and V_j are descriptors (0: of the first buffer): layout bits, and
    # below them an address in units of 16 bytes, to which steps are added. A panel is what a tile
    # has of 64 columns: lines of 128 bytes. In BY_ROWS, 16 stands in a field without meaning
    BY_ROWS, BY_COLUMNS = hx.descriptor_bits(16, 8 * LINE), hx.descriptor_bits(BC * LINE, 8 * LINE)
    Q_PANEL, K_PANEL = 64 * WARPGROUPS * LINE // 16, BC * LINE // 16
    V_STEP = 16 * LINE // 16  # 16 rows of V
    first_scores = hx.wgmma_shared(BC, half, overwrite=True, negative=NEGATIVE)
    more_scores = hx.wgmma_shared(BC, half, negative=NEGATIVE)
    more_output = hx.wgmma_registers(D, half)
    # groups finish in the order of their start: all but the last one, P V, are those of S
    wait_scores, wait_only_scores = hx.wait_products(0, N_S), hx.wait_products(1, N_S)
    wait_output = hx.wait_products(0, N_O)

    @inline
    def descriptor(bits, address):
        return uint64(bits) | uint64((address & uint32(0x3FFFF)) >> uint32(4))

    @inline
    def descriptor_at_stage(first, stage, size):
        """Return the descriptor of a stage's buffer, from that of stage 0."""
        return first + uint64(stage * uint32(size // 16))

    @inline
    def start_scores(S, Q_i, K_j):
        """S = Q_i K_jᵀ, from now on: a group of products, to be waited for."""
        hx.wgmma_fence()
        first_scores(S, Q_i, K_j)
        for step in range(1, D_STEPS):
            # 16 columns are 2 chunks of 16 bytes; the hardware swizzles the sum of the descriptor's
            # address and a place, so that the address may lie inside a line
            panel, chunk = step // 4, step % 4 * 2
            more_scores(
                S, Q_i + uint64(panel * Q_PANEL + chunk), K_j + uint64(panel * K_PANEL + chunk)
            )
        hx.wgmma_commit()

    @inline
    def start_output(O, P, V_j):
        """O = O + P V_j, from now on."""
        hx.wgmma_fence()
        for step in range(BC_STEPS):
            x = 4 * step
            more_output(O, P[x], P[x + 1], P[x + 2], P[x + 3], V_j + uint64(step * V_STEP))
        hx.wgmma_commit()

    @inline
    def mask(S, limit0, limit1):
        """Hide this thread's columns from the limits of its two rows on.

        The limits count from its first column: register 4 i is column 8 i from there.
        """
        for x in range(0, N_S, 4):
            for e in range(2):
                S[x + e] = cuda.selp(2 * x + e < limit0, S[x + e], float32(MASKED))
                S[x + 2 + e] = cuda.selp(2 * x + e < limit1, S[x + 2 + e], float32(MASKED))

    @inline
    def softmax(S, m, l, correction, scale2, masked):
        """P = 2^(scale2 (S - m)) in place of S, l with it; O still needs the correction."""
        m0, m1, x0, x1 = m[0], m[1], S[0], S[2]  # two chains for each of two rows
        for x in range(0, N_S, 4):
            m0 = ptx.fmax(m0, S[x])
            x0 = ptx.fmax(x0, S[x + 1])
            m1 = ptx.fmax(m1, S[x + 2])
            x1 = ptx.fmax(x1, S[x + 3])
        m0, m1 = ptx.fmax(m0, x0), ptx.fmax(m1, x1)
        m0 = ptx.fmax(m0, cuda.shfl_xor_sync(ALL, m0, 1))  # the four lanes of a row agree
        m1 = ptx.fmax(m1, cuda.shfl_xor_sync(ALL, m1, 1))
        m0 = ptx.fmax(m0, cuda.shfl_xor_sync(ALL, m0, 2))
        m1 = ptx.fmax(m1, cuda.shfl_xor_sync(ALL, m1, 2))
        shift0, shift1 = m0 * scale2, m1 * scale2
        c0, c1 = ptx.exp2(m[0] * scale2 - shift0), ptx.exp2(m[1] * scale2 - shift1)
        # a row without keys so far has m = -1e30: the FMA of x · scale2 - shift keeps the rounding
        # error of m · scale2, about 1e22, in place of 0, and exp2 of that is inf
        if masked:
            none0, none1 = m0 == float32(MASKED), m1 == float32(MASKED)
            shift0, c0 = cuda.selp(none0, float32(0), shift0), cuda.selp(none0, float32(0), c0)
            shift1, c1 = cuda.selp(none1, float32(0), shift1), cuda.selp(none1, float32(0), c1)
        m[0], m[1], correction[0], correction[1] = m0, m1, c0, c1
        l0, l1, y0, y1 = float32(0), float32(0), float32(0), float32(0)
        for x in range(0, N_S, 4):
            S[x] = ptx.exp2(S[x] * scale2 - shift0)
            S[x + 1] = ptx.exp2(S[x + 1] * scale2 - shift0)
            S[x + 2] = ptx.exp2(S[x + 2] * scale2 - shift1)
            S[x + 3] = ptx.exp2(S[x + 3] * scale2 - shift1)
            l0 += S[x]
            y0 += S[x + 1]
            l1 += S[x + 2]
            y1 += S[x + 3]
        l[0] = l[0] * c0 + (l0 + y0)  # this thread's columns; the lanes add up at the end
        l[1] = l[1] * c1 + (l1 + y1)

    @inline
    def rescale(O, correction):
        for x in range(0, N_O, 4):
            for e in range(4):
                O[x + e] *= correction[e // 2]

    @inline
    def round_to(P, S):
        for x in range(N_P):
            P[x] = pack(S[2 * x], S[2 * x + 1])

    @inline
    def empty(barrier):
        """Say that this warp is done with a buffer."""
        if hx.first_lane():  # a branch keeps the arrival here: see the end of the module's text
            hx.arrive(barrier)

    @inline
    def wait_for_turn(warpgroup):
        if TURNS:  # named barrier 0 is that of syncthreads
            hx.named_sync(uint32(1) + warpgroup, uint32(TURN_THREADS))

    @inline
    def give_turn(warpgroup):
        if TURNS:
            following = uint32(warpgroup + uint32(1))
            if following == uint32(WARPGROUPS):
                following = uint32(0)
            hx.named_arrive(uint32(1) + following, uint32(TURN_THREADS))

    @inline
    def overlapped_step(
        S, P, O, m, l, correction, scale2, shared, Q_i, K_0, V_0, K_stage, K_phase, V_stage,
        V_phase, warpgroup, masked, limit0, limit1,
    ):  # fmt: skip
        """S = Q_i K_jᵀ with O = O + P V of the tile before, then P (lines 8 to 16)."""
        hx.wait(shared + uint32(FULL_K) + uint32(8) * K_stage, K_phase)
        wait_for_turn(warpgroup)
        start_scores(S, Q_i, descriptor_at_stage(K_0, K_stage, TILE))
        hx.wait(shared + uint32(FULL_V) + uint32(8) * V_stage, V_phase)
        start_output(O, P, descriptor_at_stage(V_0, V_stage, TILE))
        give_turn(warpgroup)
        # from here to wait_output, P V is under way: it changes O and reads P. O is safe since the
        # wait takes it along. Nothing ties the conversions of `round_to` to it: ptxas may move them
        # up, and must then leave P's registers alone; it knows what wgmma reads
        wait_only_scores(S)
        empty(shared + uint32(EMPTY_K) + uint32(8) * K_stage)
        if masked:
            mask(S, limit0, limit1)
        softmax(S, m, l, correction, scale2, masked)
        wait_output(O)
        empty(shared + uint32(EMPTY_V) + uint32(8) * V_stage)
        rescale(O, correction)
        round_to(P, S)

    @inline
    def pass_over(shared, stage, phase, warpgroup):
        """Hand on the buffers of a tile, unused, and the turn.

        Not before they are full: until then, an arrival would count for the round before. K before
        the turn: another may need the next K for its own, which with one stage waits for this one.
        """
        hx.wait(shared + uint32(FULL_K) + uint32(8) * stage, phase)
        empty(shared + uint32(EMPTY_K) + uint32(8) * stage)
        wait_for_turn(warpgroup)
        give_turn(warpgroup)
        hx.wait(shared + uint32(FULL_V) + uint32(8) * stage, phase)
        empty(shared + uint32(EMPTY_V) + uint32(8) * stage)

    @inline
    def swapped(x, y, lane, distance):
        """Return x and y when y has been swapped with the x of the lane `distance` further on.

        (For that lane: its x with the y of the lane before.)
        """
        upper = (lane & distance) == distance
        got = uint32(cuda.shfl_xor_sync(ALL, int32(cuda.selp(upper, x, y)), distance))
        return cuda.selp(upper, got, x), cuda.selp(upper, y, got)

    @inline
    def store(O, m, l, o, lse, i, h, b, n_k, offset, scale2):
        """O / l and L = m + log l go home (line 20), of this thread's rows i and i + 8.

        Both arrays were made for this call: no gaps between columns of o, none between rows of lse.
        """
        n_q, d_v = int32(o.shape[2]), int32(o.shape[3])
        o_head = ptx.global_address(o) + uint64(int64(b) * o.strides[0] + int64(h) * o.strides[1])
        lse_head = ptx.global_address(lse) + uint64(
            int64(b) * lse.strides[0] + int64(h) * lse.strides[1]
        )
        t = int32(cuda.threadIdx.x) & 3
        four = cuda.local.array(4, uint32)
        for row in range(2):
            sum_l = l[row]
            sum_l += cuda.shfl_xor_sync(ALL, sum_l, 1)
            sum_l += cuda.shfl_xor_sync(ALL, sum_l, 2)
            inverse, L = float32(1) / sum_l, (m[row] * scale2 + ptx.log2(sum_l)) * float32(LN_2)
            here = int32(i + 8 * row)
            sees_any = cuda.selp(n_k > 0, int32(here + 1 + offset), int32(0)) > 0
            if HIDES:
                L = cuda.selp(sees_any, L, float32(-math.inf))
            writes_L = int32(cuda.selp(t == 0, here, n_q) < n_q)
            ptx.store_f32(lse_head + uint64(int64(here) * 4), L, writes_L)
            # of four tiles of 8 columns, each of a row's four lanes has two columns; when they
            # have swapped (a 4 × 4 matrix, transposed), each has all eight of one: 16 bytes
            to = o_head + uint64(int64(here) * o.strides[2] + t * 16)
            for tile in range(0, O_TILES, 4):
                for x in range(4):
                    y = 4 * (tile + x) + 2 * row
                    pair = pack(O[y] * inverse, O[y + 1] * inverse)
                    if HIDES:
                        pair = cuda.selp(sees_any, pair, uint32(0))
                    four[x] = pair
                four[0], four[1] = swapped(four[0], four[1], t, 1)
                four[2], four[3] = swapped(four[2], four[3], t, 1)
                four[0], four[2] = swapped(four[0], four[2], t, 2)
                four[1], four[3] = swapped(four[1], four[3], t, 2)
                c = tile * 8 + t * 8
                inside = int32(cuda.selp(c < d_v, here, n_q) < n_q)
                ptx.store_b32x4(
                    to + uint64(tile * 16), four[0], four[1], four[2], four[3], inside
                )  # fmt: skip

    @inline
    def multiply(shared, warpgroup, q, k, o, lse, scale2, offset, section):
        """Walk over the tiles of queries, and for each over its tiles of keys, from the last."""
        thread = int32(cuda.threadIdx.x)
        row = ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2)  # of the warpgroup's 64
        column = (thread & 3) * 2
        Q_0 = descriptor(BY_ROWS, shared + warpgroup * uint32(64 * LINE))
        K_0 = descriptor(BY_ROWS, shared + uint32(K))
        V_0 = descriptor(BY_COLUMNS, shared + uint32(V))
        S = cuda.local.array(N_S, float32)
        O = cuda.local.array(N_O, float32)
        P = cuda.local.array(N_P, uint32)
        m = cuda.local.array(2, float32)
        l = cuda.local.array(2, float32)
        correction = cuda.local.array(2, float32)
        if TURNS:
            if warpgroup == uint32(0):  # the first turn is free
                hx.named_arrive(uint32(1), uint32(TURN_THREADS))
        n_k = int32(k.shape[2])
        stage, phase = uint32(0), uint32(0)
        q_stage, q_phase = uint32(0), uint32(0)
        more, first, h, b, deal = tile_of(uint32(0), q, section)
        while more:
            j = key_tiles(first, BR, q, k, offset)
            own_first = uint32(first + uint32(64) * warpgroup)  # row of this warpgroup
            # the end of the keys that all its rows see, and of those that each of this thread's
            # rows sees, minus its first column
            all_see, limit0, limit1 = n_k, int32(n_k - column), int32(n_k - column)
            if HIDES:
                first_end = int32(own_first) + 1 + offset  # of what its first row sees
                all_see = first_end if first_end < n_k else n_k
                end0 = int32(first_end + row)
                limit0 = int32(cuda.selp(end0 < n_k, end0, n_k) - column)
                end1 = int32(end0 + 8)
                limit1 = int32(cuda.selp(end1 < n_k, end1, n_k) - column)
            own = key_tiles(own_first, 64, q, k, offset)
            while j > own:  # only other warpgroups see this tile
                j = uint32(j - uint32(1))
                pass_over(shared, stage, phase, warpgroup)
                stage, phase = next_buffer(stage, phase)
            for x in range(N_O):
                O[x] = float32(0)
            for row_of_two in range(2):
                m[row_of_two] = float32(MASKED)
                l[row_of_two] = float32(0)
            hx.wait(shared + uint32(FULL_Q) + uint32(8) * q_stage, q_phase)
            Q_i = descriptor_at_stage(Q_0, q_stage, Q_TILE)
            if OVERLAP:  # Algorithm 2; the first scores have nothing beside them (lines 4 to 6)
                j = uint32(j - uint32(1))
                hx.wait(shared + uint32(FULL_K) + uint32(8) * stage, phase)
                start_scores(S, Q_i, descriptor_at_stage(K_0, stage, TILE))
                wait_scores(S)
                empty(shared + uint32(EMPTY_K) + uint32(8) * stage)
                start = int32(j * uint32(BC))
                if start + BC > all_see:
                    mask(S, limit0 - start, limit1 - start)
                softmax(S, m, l, correction, scale2, HIDES)
                round_to(P, S)
                if HIDES:  # j is not decremented yet: j · BC is the end of the tile to come
                    while j > uint32(0) and int32(j * uint32(BC)) > all_see:
                        j = uint32(j - uint32(1))
                        last_stage, last_phase = stage, phase
                        stage, phase = next_buffer(stage, phase)
                        start = int32(j * uint32(BC))
                        overlapped_step(
                            S, P, O, m, l, correction, scale2, shared, Q_i, K_0, V_0, stage, phase,
                            last_stage, last_phase, warpgroup, True, limit0 - start, limit1 - start,
                        )  # fmt: skip
                while j > uint32(0):
                    j = uint32(j - uint32(1))
                    last_stage, last_phase = stage, phase
                    stage, phase = next_buffer(stage, phase)
                    overlapped_step(
                        S, P, O, m, l, correction, scale2, shared, Q_i, K_0, V_0, stage, phase,
                        last_stage, last_phase, warpgroup, False, limit0, limit1,
                    )  # fmt: skip
                # and the last output has nothing (18, 19)
                empty(shared + uint32(EMPTY_Q) + uint32(8) * q_stage)
                hx.wait(shared + uint32(FULL_V) + uint32(8) * stage, phase)
                start_output(O, P, descriptor_at_stage(V_0, stage, TILE))
                wait_output(O)
                empty(shared + uint32(EMPTY_V) + uint32(8) * stage)
                stage, phase = next_buffer(stage, phase)
            else:  # Algorithm 1: one after the other
                while j > uint32(0):
                    j = uint32(j - uint32(1))
                    hx.wait(shared + uint32(FULL_K) + uint32(8) * stage, phase)
                    start_scores(S, Q_i, descriptor_at_stage(K_0, stage, TILE))
                    wait_scores(S)
                    empty(shared + uint32(EMPTY_K) + uint32(8) * stage)
                    start = int32(j * uint32(BC))
                    if start + BC > all_see:
                        mask(S, limit0 - start, limit1 - start)
                    softmax(S, m, l, correction, scale2, HIDES)
                    rescale(O, correction)
                    round_to(P, S)
                    hx.wait(shared + uint32(FULL_V) + uint32(8) * stage, phase)
                    start_output(O, P, descriptor_at_stage(V_0, stage, TILE))
                    wait_output(O)
                    empty(shared + uint32(EMPTY_V) + uint32(8) * stage)
                    stage, phase = next_buffer(stage, phase)
                empty(shared + uint32(EMPTY_Q) + uint32(8) * q_stage)
            q_stage, q_phase = next_query(q_stage, q_phase)
            store(O, m, l, o, lse, int32(own_first) + row, h, b, n_k, offset, scale2)
            more, first, h, b, deal = tile_of(deal, q, section)

    def hopper(maps, q, k, v, o, lse, scale2, offset, section):
        memory = ptx.shared_address(cuda.shared.array(0, uint32))
        shared = uint32((memory + uint32(SWIZZLE_BYTES - 1)) & uint32(2**32 - SWIZZLE_BYTES))
        if hx.first_thread():
            for stage in range(QUERY_STAGES):
                barrier = shared + uint32(8 * stage)
                hx.init_barrier(barrier + uint32(FULL_Q), uint32(FULL_ARRIVALS))
                hx.init_barrier(barrier + uint32(EMPTY_Q), uint32(EMPTY_ARRIVALS))
            for stage in range(STAGES):
                barrier = shared + uint32(8 * stage)
                hx.init_barrier(barrier + uint32(FULL_K), uint32(FULL_ARRIVALS))
                hx.init_barrier(barrier + uint32(FULL_V), uint32(FULL_ARRIVALS))
                hx.init_barrier(barrier + uint32(EMPTY_K), uint32(EMPTY_ARRIVALS))
                hx.init_barrier(barrier + uint32(EMPTY_V), uint32(EMPTY_ARRIVALS))
            hx.fence_barriers()
        cuda.syncthreads()
        # `wgmma`, `setmaxnreg` and named barriers want whole warps: with the number from lane 0,
        # the compiler knows, too, that no warp goes two ways
        role = uint32(cuda.shfl_sync(ALL, int32(cuda.threadIdx.x >> 7), 0))
        if role == uint32(0):
            if GIVES:
                release_registers()
            if not TMA:
                fill_by_threads(shared, q, k, v, offset, section)
            elif hx.first_thread():
                fill_by_tma(shared, maps, q, k, v, offset, section)
        else:
            if GIVES:
                take_registers()
            multiply(shared, uint32(role - uint32(1)), q, k, o, lse, scale2, offset, section)

    return hopper
