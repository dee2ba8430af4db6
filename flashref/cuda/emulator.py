"""A block of threads in NumPy: runs the `tensor_core` kernels themselves, without a GPU.

Where Numba's simulator starts a Python thread for each CUDA thread and knows no PTX, here a value
that differs between threads is a vector with one entry per thread, and a PTX instruction is an
operation on such vectors. That works for kernels whose branches are the same for all threads of a
block, as in `tensor_core`.

Unlike a GPU, the emulator notices what goes wrong there only now and then. Shared memory starts as
NaNs, and what `cp.async` brings arrives no earlier than its wait. Whoever reads bytes that another
warp wrote, or writes over bytes that another warp read, with no `syncthreads` between, gets a
`Race`. And it counts: products, bytes copied, and how many of the eight rows of an `ldmatrix` share
a bank.
"""

import contextlib
import functools
import itertools
import types
from unittest import mock

import numpy as np

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4  # a lane's row and column pair in a fragment: see `ptx`
SHARED_NAN = 0xFF  # 0xFFFF is a NaN in float16 and in bfloat16


class Race(AssertionError):
    """Two warps met at the same bytes of shared memory with no barrier between them."""


class Block:
    """One block of threads; its methods are the functions of `ptx` and of `numba.cuda`."""

    def __init__(self, threads, shared_bytes):
        self.threads, self.warps = threads, threads // 32
        self.warp = np.arange(threads) // 32
        self.shared = np.full(shared_bytes, SHARED_NAN, np.uint8)
        self.written = np.full((2, shared_bytes), -1)  # when (barriers so far), by which warp
        self.read = np.full((2, shared_bytes), -1)
        self.barriers = 0
        self.arrays, self.pending = [], [[]]
        self.count = {"mma": 0, "ldmatrix": 0, "bytes copied": 0, "bytes added": 0}
        self.count["rows on one bank"] = 0

    # -- what `numba.cuda` offers -----------------------------------------------------------------
    def cuda(self, block_index, grid):
        """Return what stands for the module `numba.cuda` in the kernel."""
        xyz = ("x", "y", "z")
        thread_index = types.SimpleNamespace(x=np.arange(self.threads, dtype=np.int64))
        return types.SimpleNamespace(
            threadIdx=thread_index,
            blockIdx=types.SimpleNamespace(**dict(zip(xyz, block_index, strict=True))),
            gridDim=types.SimpleNamespace(**dict(zip(xyz, grid, strict=True))),
            shared=types.SimpleNamespace(array=lambda shape, dtype: "shared memory"),
            local=types.SimpleNamespace(array=lambda n, dtype: [None] * n),
            syncthreads=self.syncthreads,
            selp=lambda condition, a, b: np.where(condition, a, b)[()],
            shfl_xor_sync=lambda mask, x, lane: self.full(x)[np.arange(self.threads) ^ lane],
        )

    def full(self, x, dtype=None):
        """Return a value as a vector, one entry per thread."""
        return np.broadcast_to(np.asarray(x, dtype), (self.threads,))

    def syncthreads(self):
        """Let every warp see what the others have written."""
        self.barriers += 1

    # -- addresses --------------------------------------------------------------------------------
    def shared_address(self, array):
        """Return 0: shared memory is all one array."""
        return np.int64(0)

    def global_address(self, array):
        """Return an address from which `_bytes` finds the array again."""
        self.arrays.append(array)
        return np.uint64(len(self.arrays) << 44)

    def _bytes(self, address):
        address = self.full(address, np.uint64)
        (number,) = np.unique(address >> np.uint64(44))
        array = self.arrays[int(number) - 1]
        return array.reshape(-1).view(np.uint8), (address & np.uint64(2**44 - 1)).astype(np.int64)

    # -- asynchronous copies ----------------------------------------------------------------------
    def copy16(self, to, source, size):
        """Note the copy of 16 bytes by each thread; it happens at the next wait."""
        self._copy(16, to, source, size, 1)

    def copy8(self, to, source, size, guard):
        """Note the copy of 8 bytes by each thread whose guard is not 0."""
        self._copy(8, to, source, size, guard)

    def _copy(self, n, to, source, size, guard):
        do = self.full(guard) != 0
        warp = self.warp[do, None]
        to, size = self.full(to, np.int64)[do], self.full(size, np.int64)[do]
        memory, offset = self._bytes(source)
        offset = offset[do]
        assert (to % n == 0).all() and to.min() >= 0 and to.max() + n <= self.shared.size
        assert np.isin(size, (0, n)).all()
        data = np.zeros((len(to), n), np.uint8)
        real = size == n
        assert (offset[real] % n == 0).all(), f"not aligned to {n} bytes"
        data[real] = memory[offset[real][:, None] + np.arange(n)]
        where = to[:, None] + np.arange(n)
        self._check_write(where, warp)
        self.shared[where] = SHARED_NAN
        self.pending[-1].append((where, data, warp))
        self.count["bytes copied"] += int(size.sum())

    def copy_commit(self):
        """Close a group of copies."""
        self.pending.append([])

    def copy_wait(self):
        """Let all closed groups of copies arrive."""
        *closed, still_open = self.pending
        for where, data, warp in itertools.chain.from_iterable(closed):
            self._check_write(where, warp)
            self.shared[where] = data
            self.written[0][where], self.written[1][where] = self.barriers, warp
        self.pending = [still_open]

    def _check_write(self, where, warp):
        when, who = self.read[0][where], self.read[1][where]
        if ((when == self.barriers) & (who != warp)).any():
            raise Race(
                "a warp writes over what another may still be reading: syncthreads is missing"
            )

    def _check_read(self, where):
        """Note who reads; complain if another warp wrote there since the last barrier."""
        when, who = self.written[0][where], self.written[1][where]
        if ((when == self.barriers) & (who != self.warp[:, None])).any():
            raise Race("a warp reads what another has just written: syncthreads is missing")
        self.read[0][where], self.read[1][where] = self.barriers, self.warp[:, None]

    # -- shared memory to fragments ---------------------------------------------------------------
    def ldmatrix(self, address):
        """Return four registers: lane i gives the address of row i % 8 of matrix i // 8."""
        return self._ldmatrix(address, transposed=False)

    def ldmatrix_trans(self, address):
        """Return four registers, of the matrices transposed."""
        return self._ldmatrix(address, transposed=True)

    def _ldmatrix(self, address, transposed):
        address = self.full(address, np.int64)
        assert (address % 16 == 0).all() and address.max() + 16 <= self.shared.size
        where = address[:, None] + np.arange(16)
        self._check_read(where)
        banks = (address // 16 % 8).reshape(self.warps * 4, 8)  # 8 banks of 4 bytes feed 16 bytes
        most = max(np.bincount(row).max() for row in banks)
        self.count["rows on one bank"] = max(self.count["rows on one bank"], int(most))
        self.count["ldmatrix"] += self.warps
        matrices = self.shared[where].copy().view(np.uint16).reshape(self.warps, 4, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        low, high = matrices[:, :, G, 2 * T], matrices[:, :, G, 2 * T + 1]  # (warps, 4, 32)
        registers = low.astype(np.uint32) | high.astype(np.uint32) << 16
        return tuple(registers[:, r].reshape(-1) for r in range(4))

    def load_shared4(self, address):
        """Return four floats that lie side by side, for each thread."""
        address = self.full(address, np.int64)
        assert (address % 16 == 0).all() and address.max() + 16 <= self.shared.size
        where = address[:, None] + np.arange(16)
        self._check_read(where)
        floats = self.shared[where].copy().view(np.float32)
        return tuple(floats[:, i] for i in range(4))

    def store_shared(self, address, value):
        """Store 32 bits by every thread."""
        address = self.full(address, np.int64)
        assert (address % 4 == 0).all() and address.min() >= 0
        assert address.max() + 4 <= self.shared.size
        banks = (address // 4 % 32).reshape(self.warps, 32)
        most = max(np.bincount(row).max() for row in banks)
        self.count["rows on one bank"] = max(self.count["rows on one bank"], int(most))
        where, warp = address[:, None] + np.arange(4), self.warp[:, None]
        self._check_write(where, warp)
        data = np.ascontiguousarray(self.full(value, np.uint32))
        self.shared[where] = data.view(np.uint8).reshape(-1, 4)
        self.written[0][where], self.written[1][where] = self.barriers, warp

    # -- matrix products --------------------------------------------------------------------------
    def mma_f16(self, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """Return A B + C of every warp, as fragments, for float16."""
        return self._mma(unpack_f16, (a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3))

    def mma_bf16(self, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """Return A B + C of every warp, as fragments, for bfloat16."""
        return self._mma(unpack_bf16, (a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3))

    def _mma(self, unpack, a, b, c):
        A = np.zeros((self.warps, 16, 16), np.float32)
        B = np.zeros((self.warps, 16, 8), np.float32)
        C = np.zeros((self.warps, 16, 8), np.float32)
        for r, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            for half, x in enumerate(unpack(self.full(a[r], np.uint32))):
                A[:, G + row, 2 * T + column + half] = x.reshape(-1, 32)
        for r, row in enumerate((0, 8)):
            for half, x in enumerate(unpack(self.full(b[r], np.uint32))):
                B[:, 2 * T + row + half, G] = x.reshape(-1, 32)
        places = [(G, 2 * T), (G, 2 * T + 1), (G + 8, 2 * T), (G + 8, 2 * T + 1)]
        for r, (row, column) in enumerate(places):
            C[:, row, column] = self.full(c[r], np.float32).reshape(-1, 32)
        D = A @ B + C
        self.count["mma"] += self.warps
        return tuple(D[:, row, column].reshape(-1) for row, column in places)

    def pack_f16(self, low, high):
        """Return two floats as float16 in one register."""
        low, high = (self.full(x, np.float32).astype(np.float16) for x in (low, high))
        return low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << 16

    def pack_bf16(self, low, high):
        """Return two floats as bfloat16 in one register."""
        return to_bf16(self.full(low, np.float32)) | to_bf16(self.full(high, np.float32)) << 16

    def unpack_f16(self, register):
        """Return the two float16 of a register as floats."""
        return unpack_f16(self.full(register, np.uint32))

    def unpack_bf16(self, register):
        """Return the two bfloat16 of a register as floats."""
        return unpack_bf16(self.full(register, np.uint32))

    # -- arithmetic, loads and stores -------------------------------------------------------------
    def fmax(self, a, b):
        """Return the larger of two numbers; a NaN loses."""
        return np.fmax(a, b)

    def exp2(self, x):
        """Return 2^x."""
        return np.exp2(np.asarray(x, np.float32))

    def log2(self, x):
        """Return the logarithm to base 2."""
        return np.log2(np.asarray(x, np.float32))

    def load_b32x4(self, address, guard):
        """Return four 32-bit numbers by every thread whose guard is not 0, zeros by the others."""
        return self._load(np.uint32, 4, address, guard)

    def load_f32x2(self, address, guard):
        """Return two floats by every thread whose guard is not 0, zeros by the others."""
        return self._load(np.float32, 2, address, guard)

    def load_f32x4(self, address, guard):
        """Return four floats by every thread whose guard is not 0, zeros by the others."""
        return self._load(np.float32, 4, address, guard)

    def load_f32(self, address, guard):
        """Return a float by every thread whose guard is not 0, zero by the others."""
        return self._load(np.float32, 1, address, guard)[0]

    def _load(self, dtype, n, address, guard):
        memory, offset = self._bytes(address)
        do = self.full(guard) != 0
        assert (offset[do] % (4 * n) == 0).all(), f"not aligned to {4 * n} bytes"
        data = np.zeros((self.threads, 4 * n), np.uint8)
        data[do] = memory[offset[do][:, None] + np.arange(4 * n)]
        return tuple(data.view(dtype).T)

    def store_b32(self, address, value, guard):
        """Store 32 bits by every thread whose guard is not 0."""
        self._store(address, self.full(value, np.uint32), guard)

    def store_f32(self, address, value, guard):
        """Store a float by every thread whose guard is not 0."""
        self._store(address, self.full(value, np.float32), guard)

    def store_b32x4(self, address, a, b, c, d, guard):
        """Store 4 times 32 bits by every thread whose guard is not 0."""
        self._store(address, np.stack([self.full(x, np.uint32) for x in (a, b, c, d)], 1), guard)

    def store_f32x4(self, address, a, b, c, d, guard):
        """Store four floats by every thread whose guard is not 0."""
        self._store(address, np.stack([self.full(x, np.float32) for x in (a, b, c, d)], 1), guard)

    def _store(self, address, value, guard):
        memory, offset = self._bytes(address)
        do = self.full(guard) != 0
        data = np.ascontiguousarray(value).view(np.uint8).reshape(self.threads, -1)
        n = data.shape[1]
        assert (offset[do] % n == 0).all(), f"not aligned to {n} bytes"
        memory[offset[do][:, None] + np.arange(n)] = data[do]

    def add_f32x4(self, address, a, b, c, d):
        """Add four floats to neighbours in memory by every thread."""
        assert (self._bytes(address)[1] % 16 == 0).all(), "not aligned to 16 bytes"
        self._add(address, (a, b, c, d), 4)

    def add_f32_128_apart(self, address, a, b, c, d):
        """Add four floats to memory, 128 bytes apart, by every thread."""
        self._add(address, (a, b, c, d), 128)

    def _add(self, address, values, stride):
        memory, offset = self._bytes(address)
        assert (offset % 4 == 0).all(), "not aligned to 4 bytes"
        for i, x in enumerate(values):  # threads that meet at an address all count
            np.add.at(memory.view(np.float32), (offset + i * stride) // 4, self.full(x))
        self.count["bytes added"] += 16 * self.threads


def unpack_f16(register):
    """Return the two float16 of a register as float32: low, high."""
    halves = np.ascontiguousarray(register).view(np.float16).reshape(-1, 2)
    return halves[:, 0].astype(np.float32), halves[:, 1].astype(np.float32)


def unpack_bf16(register):
    """Return the two bfloat16 of a register as float32: low, high."""
    register = np.ascontiguousarray(register)
    return (register << 16).view(np.float32), (register & 0xFFFF0000).view(np.float32)


def to_bf16(x):
    """Return floats as the bits of the nearest bfloat16 (ties to even), in 32-bit integers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint32)


def attention(
    q, k, v, *, half="float16", scale=None, causal=False, blocks=(32, 16, 2, True), tiles=None
):  # fmt: skip
    """Return o, lse and the counts of the `tensor_core` kernel, emulated block by block.

    Parameters
    ----------
    q, k, v : uint16 arrays (batch, heads, n, d)
        C-contiguous; the bits of float16 or bfloat16 numbers.
    half : {"float16", "bfloat16"}
        What the bits mean.
    scale, causal
        As in `flashref.cuda.flash_attention_2`.
    blocks : tuple
        (BR, BC, warps, Q in registers), as in `tensor_core.BLOCKS`.
    tiles : BlockMask, optional
        Which tiles are there; all if None.

    Returns
    -------
    o : uint16 array (batch, heads, n_q, d_v)
    lse : float32 array (batch, heads, n_q)
    counts : dict
        Summed over blocks; "rows on one bank" is the worst case, 1 where nothing collides.
    """
    o, lse = _unwritten((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], np.nan, np.float32)
    run = _Run(half, blocks, tiles)
    run.rung("forward", q, k, v, o, lse, *_rules(q, k, scale, causal))
    return o, lse, run.counts


def attention_backward(
    do, q, k, v, o, lse, *, half="float16", scale=None, causal=False, blocks=None, tiles=None,
    deterministic=False, capability=(9, 0),
):  # fmt: skip
    """Return dq, dk, dv and the counts of the backward kernels, emulated block by block.

    Parameters
    ----------
    do, q, k, v, o : uint16 arrays (batch, heads, n, d)
        C-contiguous; the bits of float16 or bfloat16 numbers.
    lse : float32 array (batch, heads, n_q)
        From the forward pass, like o.
    half, scale, causal, tiles
        As in `attention`.
    blocks : dict, optional
        "keys" and "queries": what each pass has in `tensor_core_backward.KEYS` and `.QUERIES`.
    deterministic : bool
        As in `flashref.cuda.flash_attention_2_backward`.
    capability : tuple
        Of the card: from (9, 0) on, additions to memory take four floats at once.

    Returns
    -------
    dq, dk, dv : uint16 arrays of the shapes of q, k, v
    counts : dict
        As in `attention`.
    """
    blocks = blocks or {"keys": (32, 16, 2, True, 1), "queries": (32, 16, 2, True)}
    results = [_unwritten(x.shape) for x in (q, k, v)]
    run = _Run(half, blocks, tiles)
    run.deterministic, run.capability = deterministic, capability
    run.rung("backward", do, q, k, v, o, lse, *results, *_rules(q, k, scale, causal))
    return *results, run.counts


def _unwritten(shape):
    return np.full(shape, 0xFFFF, np.uint16)  # NaNs: what is not written shows


def _rules(q, k, scale, causal):
    """Return what the kernels get: the scale, and the offset of the last visible key."""
    n_q, n_k = q.shape[2], k.shape[2]
    offset = {True: n_k - n_q, "top-left": 0, False: n_k}[causal]
    return q.shape[3] ** -0.5 if scale is None else scale, offset


class _Run:
    """What a rung gets as `run`: it emulates where the real one launches."""

    def __init__(self, half, blocks, tiles):
        self.dtype, self.blocks, self.tiles, self.counts = half, blocks, tiles, {}

    def rung(self, direction, *arguments):
        """Call `forward` or `backward` of the rung, with kernels that are built when they run."""
        from flashref.cuda import tensor_core, tensor_core_backward

        module = tensor_core if direction == "forward" else tensor_core_backward
        makers = {name: make for name, make in vars(module).items() if name.endswith("_kernel")}
        lazy = {name: functools.partial(_lazy, make.__wrapped__) for name, make in makers.items()}
        with mock.patch.multiple(module, **lazy):
            getattr(module, direction)(self, *arguments)

    def empty(self, shape):
        """Return a float32 array for the rung's own use."""
        return np.full(shape, np.nan, np.float32)

    def lists(self, own, rows):
        """Return the lists of tiles."""
        return *self.tiles.lists(own, rows), self.tiles.blocks(own)[0]

    def first_that_fits(self, kernels):
        """Return the first kernel: NumPy has memory enough."""
        return kernels[0]

    def order(self, grid):
        """Return the blocks of a launch in the order in which they run; a GPU promises none."""
        return np.ndindex(*grid)

    def __call__(self, kernel, grid, *arguments):
        """Run the blocks of a launch one after the other."""
        arguments = [np.float32(x) if isinstance(x, float) else x for x in arguments]
        for index in self.order(grid):
            block = Block(kernel.threads, kernel.shared_bytes)
            with _in_place_of_numba(block, index, grid):
                kernel.build().function(*arguments)
            for name, n in block.count.items():
                seen = self.counts.get(name, 0)
                self.counts[name] = max(seen, n) if name == "rows on one bank" else seen + n


def _lazy(make, *arguments):
    """Return a kernel's numbers, and `build`, which makes it of what its module then holds."""
    with _in_place_of_numba(None, (0, 0, 0), (1, 1, 1)):
        kernel = make(*arguments)
    return types.SimpleNamespace(
        threads=kernel.threads, shared_bytes=kernel.shared_bytes, rows=kernel.rows,
        columns=kernel.columns, build=functools.partial(make, *arguments),
    )  # fmt: skip


@contextlib.contextmanager
def _in_place_of_numba(block, index, grid):
    """Let the modules with kernels find the emulator where they look for numba and PTX."""
    from flashref.cuda import fragments, ptx, tensor_core, tensor_core_backward

    def cast(dtype):
        return lambda x: np.asarray(x).astype(dtype)[()]

    casts = {"int32": np.int64, "int64": np.int64, "uint32": np.uint32, "uint64": np.uint64}
    names = {name: cast(dtype) for name, dtype in casts.items()}
    names |= {"float32": cast(np.float32), "inline": lambda function: function}
    names |= {"ptx": ptx, "cuda": None}
    if block is not None:
        names |= {"ptx": block, "cuda": block.cuda(index, grid)}
    with contextlib.ExitStack() as stack:
        for module in (fragments, tensor_core, tensor_core_backward):
            here = {name: x for name, x in names.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **here))
        stack.enter_context(np.errstate(all="ignore"))
        yield
