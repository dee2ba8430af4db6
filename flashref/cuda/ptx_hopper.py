"""Hopper's own PTX instructions (sm_90a), as functions that a kernel calls.

Three things are new. `wgmma` multiplies for four warps at once, reads tiles from shared memory by
itself, and is not finished when the next instruction starts. TMA copies whole tiles, started by one
thread. And barriers in shared memory (`mbarrier`) say when either is done. `emulator_hopper.Block`
does in NumPy what each function here does: as late as it may, and refusing what only luck would
make right.

`wgmma`: D = A B + D, with D of 64 × N floats, A 64 × 16 halves, B 16 × N halves, by a warpgroup:
128 threads, warps 0 … 3. With g = lane // 4 and t = lane % 4, lane g, t of warp w holds of

    D  N / 2 registers   D[16 w + g    , 8 i + 2 t : +2] in 4 i, 4 i + 1, for i = 0 … N / 8 - 1
                         D[16 w + g + 8, 8 i + 2 t : +2] in 4 i + 2, 4 i + 3
    A  4 registers       as in `ptx`, of rows 16 w … 16 w + 15: so P, which is a D rounded to
                         halves, is the A of the next product, register by register

B, and A where it is not in registers, lies in shared memory where a descriptor of 64 bits says:
address / 16 in bits 0 to 13, a leading stride / 16 in bits 16 to 29, another stride / 16 in bits 32
to 45; the two bits 62-63 hold 1: the 128-byte swizzle, the only one used here. In it, lines of 128
bytes hold 64 halves, 8 chunks of 16 bytes; chunk c of a line lies at place c ^ (line % 8), where
lines are counted from a multiple of 1024 bytes. For a tile stored by rows of at most 64 columns,

    rows are its columns' partners (Q and K, whose columns are summed over): 16 columns are 32
        bytes of each line; 8 rows further is the second stride, 1024; the first has no meaning
    columns are (V, whose rows are summed over, "transposed"): 16 rows are 2048 bytes; 8 rows
        further is the second stride, 1024; 64 columns further, a tile of its own, is the first

`mbarrier`: counts arrivals, and bytes that TMA brings, to what was announced; then its phase is
over and the next begins by itself. Phases have parities 0, 1, 0, …; `wait` names the parity of the
phase that must be over. On a new barrier, parity 1 counts as over: buffers begin as empty.

A register that an unfinished `wgmma` uses must not be touched; the compiler sees to it only as far
as it can see. Hence `wait_products` takes the results along: nothing that uses them can be moved
before it. An A in registers is not: to leave these alone until then is up to ptxas, which knows
what `wgmma` reads. Where ptxas is not sure, it waits after each product, and says so
(C7510 to C7514).
"""

from flashref.cuda.ptx import U32, U64, instruction, on_registers

DESCRIPTOR = 1 << 62  # 128-byte swizzle
WGMMA_DTYPES = {"float16": "f16", "bfloat16": "bf16"}


def descriptor_bits(leading, stride):
    """Return a descriptor without its address: strides in bytes."""
    return DESCRIPTOR | stride // 16 << 32 | leading // 16 << 16


# -- products: f(D, a, b), where D is a local array -----------------------------------------------
def wgmma_shared(N, half, overwrite=False, negative=False):
    """Return D = D + A B for A and B in shared memory, both by rows: f(D, A's and B's descriptor).

    With overwrite, D = A B; with negative, of -A.
    """
    return _wgmma(N, half, f"${N // 2}", [U64], f"{-1 if negative else 1}, 1, 0, 0", overwrite)


def wgmma_registers(N, half):
    """Return D = D + A B for A in registers and B by columns: f(D, a0, a1, a2, a3, descriptor)."""
    a = ", ".join(f"${N // 2 + i}" for i in range(4))
    return _wgmma(N, half, f"{{{a}}}", [U32] * 4, "1, 1, 1", False)


def _wgmma(N, half, a, a_types, signs_and_transposed, overwrite):
    half, count = WGMMA_DTYPES[half], N // 2
    D = ", ".join(f"${i}" for i in range(count))
    # whether D is added ("scale-d") is a predicate in PTX, which takes no constant there
    return on_registers(
        f"{{ .reg .pred keep; setp.ne.b32 keep, {int(not overwrite)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{half}.{half} {{{D}}}, {a}, "
        f"${count + len(a_types)}, keep, {signs_and_transposed}; }}",
        count,
        [*a_types, U64],
        # an old D that is read, if only to be overwritten, would keep its registers until here
        reads=not overwrite,
    )


def wait_products(pending, count):
    """Return f(D): wait until at most `pending` groups of products are unfinished."""
    return on_registers(f"wgmma.wait_group.sync.aligned {pending};", count)


# before the first product that uses registers which were written by anything else
wgmma_fence = instruction("wgmma.fence.sync.aligned;", touches_memory=True)
wgmma_commit = instruction("wgmma.commit_group.sync.aligned;", touches_memory=True)  # ends a group

# -- barriers in shared memory; addresses are multiples of 8 --------------------------------------
init_barrier = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", [U32, U32], (), True)
fence_barriers = instruction("fence.mbarrier_init.release.cluster;", touches_memory=True)
arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", [U32], (), True)
arrive_expecting = instruction(  # one arrival, and bytes to come: arrive_expecting(barrier, bytes)
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", [U32, U32], (), True
)
wait = instruction(  # wait(barrier, parity)
    "{ .reg .pred over; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1; "
    "@!over bra AGAIN; }",
    [U32, U32],
    (),
    True,
)

# -- copies ---------------------------------------------------------------------------------------
# One box of a tensor map to shared memory, and its bytes to a barrier; started by one thread:
# load_box(to, map, barrier, column, row, head, batch). What lies outside the tensor becomes 0.
load_box = instruction(
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$3, $4, $5, $6}], [$2];",
    [U32, U64, U32, U32, U32, U32, U32],
    (),
    True,
)
# fence_map(map), before a tensor map in device memory is used: an ordinary copy brought it there,
# but TMA reads it by a way of its own (the tensormap proxy), which need not have seen that yet
fence_map = instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", [U64], (), True)
copy_wait_but_one = instruction("cp.async.wait_group 1;", touches_memory=True)
# what this thread wrote to shared memory itself, `wgmma` will see
fence_writes = instruction("fence.proxy.async.shared::cta;", touches_memory=True)

# -- the sixteen barriers of a block: number, threads that take part ------------------------------
named_sync = instruction("bar.sync $0, $1;", [U32, U32], (), True)
named_arrive = instruction("bar.arrive $0, $1;", [U32, U32], (), True)


# -- who I am -------------------------------------------------------------------------------------
def _first_of(threads):
    """Return 1 in the first of so many threads, else 0: for an `if` of a single thread."""
    return instruction(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; "
        f"and.b32 t, t, {threads - 1}; setp.eq.u32 p, t, 0; selp.u32 $0, 1, 0, p; }}",
        (),
        [U32],
    )


first_lane, first_thread = _first_of(32), _first_of(1024)  # of its warp; of the block


def set_registers(n, more):
    """Return f(): each thread of the warpgroup has n registers from here on, more or less."""
    kind = "inc" if more else "dec"
    return instruction(f"setmaxnreg.{kind}.sync.aligned.u32 {n};", touches_memory=True)
