"""A block of warpgroups in NumPy: runs the `hopper` kernel itself, without a GPU.

As in `emulator`, what differs between threads is a vector, here of the 128 threads of a warpgroup.
Unlike there, warpgroups go their own ways: each runs until it must wait for another, one at a time,
in an order that a seed decides. And what the hardware does on its own happens as late as it may:
what TMA and `cp.async` bring arrives when nobody can run without it.

Correct results are not enough, since a GPU may be earlier or later. So the emulator keeps account
of who can know what (vector clocks): a barrier passes on what those who arrived at it had done.
Reading bytes whose arrival one cannot know of, or writing over bytes that somebody may still be
reading, is a `Race`, whichever came first this time. `wgmma` is never finished before its wait:
to touch its registers earlier, or to skip the fences before it, is a `Misuse`. When all wait, a
`Deadlock` says who waits for what.

Not modelled: time, bank conflicts, caches, the order of loads and stores of device memory.
"""

import contextlib
import ctypes
import itertools
import random
import threading
import types
from unittest import mock

import numpy as np

from flashref.cuda import emulator
from flashref.cuda.tma import BYTES, COLUMNS, TensorMap, map_of

THREADS = 128  # of a warpgroup
REGISTERS = 65536  # of a multiprocessor
FIRST_BYTE = 400  # where shared memory begins: not where a tile may
THREAD = np.arange(THREADS)
G, T = THREAD % 32 // 4, THREAD % 4  # see `ptx_hopper`


class Race(AssertionError):
    """Two warpgroups, or one and a copy, meet at the same bytes in no order."""


class Misuse(AssertionError):
    """An instruction was used in a way that the hardware leaves undefined."""


class Deadlock(AssertionError):
    """Everybody waits."""


class _Stopped(BaseException):
    """Ends the warpgroups that are left when another has failed."""


def attention(
    q, k, v, *, half="float16", scale=None, causal=False, schedule=None, seed=0, processors=2
):  # fmt: skip
    """Return o, lse and the counts of the `hopper` kernel, emulated block by block.

    Parameters
    ----------
    q, k, v : uint16 arrays (batch, heads, n, d)
        The bits of float16 or bfloat16 numbers; rows contiguous, strides multiples of 16 bytes.
    half : {"float16", "bfloat16"}
        What the bits mean.
    scale, causal
        As in `flashref.cuda.flash_attention_2`.
    schedule : hopper.Schedule, optional
        The fastest one if None.
    seed : int
        Decides who runs when several can, and which copy arrives when several may.
    processors : int
        Blocks of a persistent schedule.

    Returns
    -------
    o : uint16 array (batch, heads, n_q, d_v)
    lse : float32 array (batch, heads, n_q)
    counts : dict
        "wgmma" instructions, "bytes" copied to shared memory, "blocks".
    """
    from flashref.cuda import hopper

    o = np.full((*q.shape[:3], v.shape[3]), 0xFFFF, np.uint16)  # NaNs: what is not written shows
    lse = np.full(q.shape[:3], np.nan, np.float32)
    offset = {True: k.shape[2] - q.shape[2], "top-left": 0, False: k.shape[2]}[causal]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    run = Run(half, schedule, processors, seed)
    with run.in_place_of_numba():
        hopper.forward(run, q, k, v, o, lse, scale, offset)
    return o, lse, run.count


class Run:
    """What a rung gets as `run`: it emulates where the real one launches."""

    def __init__(self, half, schedule, processors, seed):
        self.dtype, self.blocks, self.multiprocessors = half, schedule, processors
        self.random, self.block, self.layout = random.Random(seed), None, None
        self.count = {"wgmma": 0, "bytes": 0, "blocks": 0}
        self.memory = Memory()

    @contextlib.contextmanager
    def in_place_of_numba(self):
        """Let the modules with the kernel find the emulator where they look for numba and PTX."""
        from flashref.cuda import hopper, hopper_tiles

        def cast(dtype):
            return lambda x: np.asarray(x).astype(dtype)[()]

        casts = {"int32": np.int64, "int64": np.int64, "uint32": np.uint32, "uint64": np.uint64}
        names = {name: cast(dtype) for name, dtype in casts.items()} | {"float32": cast(np.float32)}
        names |= {name: _Following(self) for name in ("cuda", "ptx", "hx")}
        names |= {"inline": lambda function: function, "forward_kernel": self.forward_kernel}
        self.make = hopper.forward_kernel.__wrapped__
        with contextlib.ExitStack() as stack:
            for module in (hopper_tiles, hopper):
                here = {name: x for name, x in names.items() if hasattr(module, name)}
                stack.enter_context(mock.patch.multiple(module, **here))
            stack.enter_context(np.errstate(all="ignore"))
            yield

    def forward_kernel(self, D, half, schedule, hides, negative):
        """Return a kernel of emulated instructions; note its layout, to name barriers."""
        from flashref.cuda import hopper

        self.layout = hopper.shared_layout(D, schedule)
        self.block = Block(self, 0, 0, (0, 0, 0), (0, 0, 0))
        return self.make(D, half, schedule, hides, negative)

    def tensor_maps(self, *boxes):
        """Return tensor maps as one address, from which the emulated TMA finds them."""
        maps = (map_of(x, self.memory.address(x), self.dtype, *rows) for x, *rows in boxes)
        return [TensorMap(*x) for x in maps]

    def __call__(self, kernel, grid, *arguments):
        """Run the blocks of a launch one after the other."""
        arguments = [np.float32(x) if isinstance(x, float) else x for x in arguments]
        for index in np.ndindex(*grid):
            self.count["blocks"] += 1
            self.block = Block(self, kernel.threads, kernel.shared_bytes, index, grid)
            self.block.run(kernel.function, arguments)


class _Following:
    """Stands for `numba.cuda` and the modules of PTX: the functions of the block that runs."""

    def __init__(self, run):
        self.run = run

    def __getattr__(self, name):
        return getattr(self.run.block, name)


class Memory:
    """Device memory: arrays, and addresses that lead back to them."""

    def __init__(self):
        self.arrays = []

    def address(self, x):
        """Return the address of an array's first element."""
        if not any(x is y for y in self.arrays):
            self.arrays.append(x)
        number = next(i for i, y in enumerate(self.arrays) if x is y)
        return (number + 1) << 44

    def at(self, address):
        """Return the array of an address, and how many bytes the address lies behind its start."""
        return self.arrays[(int(address) >> 44) - 1], int(address) & (2**44 - 1)

    def bytes(self, x):
        """Return an array's memory, from its first element to its last, gaps included."""
        extent = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)) + x.itemsize
        memory = (ctypes.c_uint8 * max(extent, 0)).from_address(x.ctypes.data)
        return np.frombuffer(memory, np.uint8)


class Registers:
    """A local array of a warpgroup: which of them an unfinished product uses."""

    def __init__(self, n):
        self.values, self.result = [None] * n, None
        self.unfinished = 0  # products that write here, or read from here
        self.hidden = False  # finished, but no wait has taken it along
        self.fresh = False  # written since the last fence

    def __getitem__(self, i):
        if self.result is not None:
            raise Misuse("reads the result of a wgmma before waiting for it")
        if self.hidden:
            raise Misuse("reads a result that no wait has taken along: it may be read too early")
        return self.values[i]

    def __setitem__(self, i, value):
        if self.unfinished:
            raise Misuse("writes a register that an unfinished wgmma uses")
        self.values[i], self.fresh = value, True


class Barrier:
    """An mbarrier: what its phase still lacks, and what those knew who ended the last."""

    def __init__(self, name, count, maker):
        self.name, self.count, self.phase, self.maker = name, count, 0, maker
        self.made_at, self.fenced = maker.clock[maker.number], False
        self.arrivals, self.bytes = count, 0
        self.gathered, self.passed_on = Knowledge(len(maker.clock)), Knowledge(len(maker.clock))

    def step(self, arrivals, n_bytes, knowledge):
        """Take arrivals and bytes into account; the phase may end."""
        if arrivals > self.arrivals:
            raise Misuse(f"{self.name}: more arrivals than the {self.count} of a phase")
        self.arrivals, self.bytes = self.arrivals - arrivals, self.bytes + n_bytes
        self.gathered.add(knowledge)
        if self.arrivals == self.bytes == 0:
            self.passed_on, self.gathered = self.gathered, Knowledge(len(self.gathered.clock))
            self.phase, self.arrivals = self.phase + 1, self.count

    def over(self, parity):
        """Return whether the phase of this parity is over."""
        return (self.phase & 1) != parity

    def __str__(self):
        return (
            f"{self.name}, whose phase {self.phase} lacks {self.arrivals} arrivals "
            f"and {self.bytes} bytes"
        )


class Knowledge:
    """How far each warpgroup was known to be, and which copies were known to have arrived."""

    def __init__(self, warpgroups, clock=None, arrived=()):
        self.clock = np.full(warpgroups, -1) if clock is None else clock.copy()
        self.arrived = set(arrived)

    def add(self, other):
        """Know also what another knows."""
        self.clock = np.maximum(self.clock, other.clock)
        self.arrived |= other.arrived


class Warpgroup(Knowledge):
    """128 threads that go the same way."""

    def __init__(self, block, number, warpgroups):
        super().__init__(warpgroups)
        self.block, self.number, self.clock[number] = block, number, 0
        self.arrays, self.groups, self.open = [], [], []  # registers; unfinished products
        self.copies, self.maps, self.acting = [[]], set(), THREADS
        self.waits_for, self.done, self.error = None, False, None
        self.turn = threading.Semaphore(0)
        self.registers = 0

    def start(self, function, arguments):
        """Run the kernel in a thread of its own, when it is this warpgroup's turn."""

        def body():
            self.turn.acquire()
            try:
                with np.errstate(all="ignore"):
                    self.block.check_running()
                    function(*arguments)
                    self.finish()
            except BaseException as error:
                self.error = error
            self.done = True
            self.block.back.release()

        self.thread = threading.Thread(target=body, daemon=True)
        self.thread.start()

    def finish(self):
        """Check that nothing is left undone at the end."""
        if self.groups or self.open:
            raise Misuse("the kernel ends with a wgmma unfinished")

    def wait(self, can_go_on, what):
        """Let others run until `can_go_on()`."""
        self.waits_for = can_go_on, what
        self.block.back.release()
        self.turn.acquire()
        self.block.check_running()
        self.waits_for = None

    def __str__(self):
        return f"warpgroup {self.number}"

    def tick(self):
        """Begin something new: what is done from here on, nobody was told yet."""
        self.clock[self.number] += 1


class Block(emulator.Block):
    """One block; its methods are the functions of `ptx`, `ptx_hopper` and `numba.cuda`."""

    def __init__(self, machine, threads, shared_bytes, index, grid):
        # vectors have the length of a warpgroup
        self.threads, self.warps, self.all_threads, self.machine = THREADS, 4, threads, machine
        self.count, self.memory = machine.count, machine.memory
        xyz = ("x", "y", "z")
        self.blockIdx = types.SimpleNamespace(**dict(zip(xyz, index, strict=True)))
        self.gridDim = types.SimpleNamespace(**dict(zip(xyz, grid, strict=True)))
        self.shared = types.SimpleNamespace(array=lambda shape, dtype: "shared memory")
        self.local = types.SimpleNamespace(array=self._local_array)
        n = threads // THREADS
        self.end = FIRST_BYTE + shared_bytes
        chunks = self.end // 16 + 1
        self.bytes = np.full(16 * chunks, emulator.SHARED_NAN, np.uint8)
        self.copy_of = np.full(chunks, -1)  # the copy that wrote there last; -1: nothing was
        self.under_way = np.zeros(chunks, bool)
        self.unfenced = np.zeros(chunks, bool)  # written by threads, so `wgmma` may not see it
        self.written_by, self.written_at = np.full(chunks, -1), np.full(chunks, -1)
        self.read_at = np.full((n, chunks), -1)
        self.loads, self.copies = [], 0  # of TMA, under way; numbers for all copies
        self.barriers, self.named = {}, {}
        self.warpgroups = [Warpgroup(self, i, n) for i in range(n)]
        self.back, self.now, self.failed = threading.Semaphore(0), None, False
        # a launch gives all threads alike; setmaxnreg moves them in steps of 8
        per_thread = min(248, REGISTERS // max(threads, 1) // 8 * 8)
        self.free_registers = 0
        for w in self.warpgroups:
            w.registers = per_thread

    # -- who runs ---------------------------------------------------------------------------------
    def run(self, function, arguments):
        """Run the kernel on all warpgroups to its end."""
        for w in self.warpgroups:
            w.start(function, arguments)
        try:
            while not all(w.done for w in self.warpgroups):
                self._run_one()
            if self.loads:
                raise Misuse("the block ends while a copy is under way")
        finally:
            self.failed = True
            for w in self.warpgroups:
                if not w.done:
                    w.turn.release()
            for w in self.warpgroups:
                w.thread.join()

    def _run_one(self):
        able = [w for w in self.warpgroups if not w.done]
        able = [w for w in able if w.waits_for is None or w.waits_for[0]()]
        if not able:
            if not self.loads:
                waiting = [w for w in self.warpgroups if not w.done]
                raise Deadlock("; ".join(f"{w} waits for {w.waits_for[1]()}" for w in waiting))
            self._land(self.loads.pop(self.machine.random.randrange(len(self.loads))))
            return
        self.now = self.machine.random.choice(able)
        self.now.turn.release()
        self.back.acquire()
        if self.now.error is not None:
            raise self.now.error

    def check_running(self):
        """Leave, if another warpgroup has failed."""
        if self.failed:
            raise _Stopped

    # -- what `numba.cuda` offers -----------------------------------------------------------------
    @property
    def threadIdx(self):
        """The threads of the warpgroup that runs."""
        return types.SimpleNamespace(x=THREAD + THREADS * self.now.number)

    def _local_array(self, n, dtype):
        self.now.arrays.append(Registers(n))
        return self.now.arrays[-1]

    def selp(self, condition, a, b):
        """Return a where the condition holds, else b."""
        return np.where(condition, a, b)[()]

    def shfl_xor_sync(self, mask, x, lane):
        """Return what another lane of the same warp has."""
        return self.full(x)[THREAD ^ lane]

    def shfl_sync(self, mask, x, lane):
        """Return what one lane of each warp has: a number, if all warps have the same."""
        self.now.acting = THREADS
        x = self.full(x)[THREAD // 32 * 32 + lane]
        return x[0] if (x == x[0]).all() else x

    def syncthreads(self):
        """Wait for all threads of the block."""
        self.now.acting = THREADS
        self.named_sync(0, self.all_threads)

    # -- addresses --------------------------------------------------------------------------------
    def shared_address(self, array):
        """Return where shared memory begins."""
        return np.uint32(FIRST_BYTE)

    def global_address(self, array):
        """Return an address from which `_bytes` finds the array again."""
        return np.uint64(self.memory.address(array))

    def _bytes(self, address):
        address = self.full(address, np.uint64)
        (number,) = np.unique(address >> np.uint64(44))
        array = self.memory.arrays[int(number) - 1]
        return self.memory.bytes(array), (address & np.uint64(2**44 - 1)).astype(np.int64)

    # -- shared memory: who may read and write ----------------------------------------------------
    def _chunks(self, address):
        """Return the chunks of 16 bytes that hold these addresses."""
        self._inside(address)
        return np.unique(address // 16)

    def _inside(self, address):
        assert FIRST_BYTE <= address.min() and address.max() < self.end, "outside shared memory"

    def _may_read(self, chunks):
        """Complain if `wgmma` of the warpgroup that runs cannot know what lies there."""
        me = self.now
        if self.under_way[chunks].any():
            raise Race("a wgmma reads what is still under way")
        copies = np.unique(self.copy_of[chunks])
        if copies[0] < 0:
            raise Race("a wgmma reads what nobody has written")
        by_threads = self.written_by[chunks] >= 0
        if self.unfenced[chunks].any():
            raise Race("a wgmma reads what threads wrote: a fence of their writes is missing")
        if (self.written_at[chunks] > me.clock[self.written_by[chunks]])[by_threads].any():
            raise Race("a wgmma reads what another warpgroup wrote, without waiting for it")
        if not me.arrived.issuperset(np.unique(self.copy_of[chunks[~by_threads]]).tolist()):
            raise Race("a wgmma reads what TMA brought, without waiting for it")

    def _may_write(self, chunks):
        """Complain if the warpgroup that runs cannot know that all have read what lies there."""
        if self.under_way[chunks].any():
            raise Race("a copy to where another copy is under way")
        for w in self.warpgroups:
            for product in [*w.open, *(p for group in w.groups for p in group)]:
                if np.isin(product.chunks, chunks).any():
                    raise Race(f"a copy to where a wgmma of warpgroup {w.number} is reading")
            if (self.read_at[w.number, chunks] > self.now.clock[w.number]).any():
                raise Race(f"a copy to where warpgroup {w.number} may still be reading")

    # -- barriers ---------------------------------------------------------------------------------
    def first_thread(self):
        """Return 1 in the warpgroup of the block's first thread; then only that runs on."""
        self.now.acting = 1 if self.now.number == 0 else THREADS
        return int(self.now.number == 0)

    def first_lane(self):
        """Return 1: of each warp, one thread goes on to arrive somewhere."""
        self.now.acting = THREADS // 32
        return 1

    def init_barrier(self, address, count):
        """Make a barrier."""
        self._only_one()
        assert address % 8 == 0
        self.barriers[int(address)] = Barrier(self._name(address), int(count), self.now)

    def fence_barriers(self):
        """Let the new barriers be seen."""
        for barrier in self.barriers.values():
            barrier.fenced = True

    def _name(self, address):
        at = int(address) - -(-FIRST_BYTE // 1024) * 1024
        places = [(x, name) for name, x in vars(self.machine.layout).items() if "_" in name]
        start, name = max((x, name) for x, name in places if x <= at)
        return f"{name}[{(at - start) // 8}]"

    def _barrier(self, address):
        barrier = self.barriers.get(int(address))
        if barrier is None:
            raise Misuse(f"no barrier at byte {address} yet")
        if not barrier.fenced or barrier.made_at > self.now.clock[barrier.maker.number]:
            raise Race(f"{barrier.name} is used before its making can be seen")
        return barrier

    def arrive(self, address):
        """Arrive, by all threads or those of an `if` just before; pass on what was done so far."""
        self._barrier(address).step(self.now.acting, 0, self.now)
        self.now.tick()
        self.now.acting = THREADS

    def arrive_expecting(self, address, n_bytes):
        """Arrive once, and announce bytes."""
        self._only_one()
        self._barrier(address).step(1, int(n_bytes), self.now)
        self.now.tick()

    def wait(self, address, parity):
        """Wait until the phase of this parity is over; know what was passed on."""
        barrier = self._barrier(address)
        if not barrier.over(parity):
            self.now.wait(lambda: barrier.over(parity), lambda: f"parity {parity} of {barrier}")
        self.now.add(barrier.passed_on)

    def named_arrive(self, number, threads, kind="arrives"):
        """Arrive at one of the sixteen barriers, without waiting."""
        number = int(number)
        state = self.named.setdefault(number, types.SimpleNamespace(here=[], round=0, told=[]))
        if (self.now, kind) in state.here:
            raise Misuse(f"warpgroup {self.now.number} {kind} twice at named barrier {number}")
        state.here.append((self.now, kind))
        state.told.append(Knowledge(len(self.warpgroups), self.now.clock, self.now.arrived))
        self.now.tick()
        if len(state.here) * THREADS == threads:
            state.passed_on = Knowledge(len(self.warpgroups))
            for told in state.told:
                state.passed_on.add(told)
            state.here, state.told, state.round = [], [], state.round + 1
        return state

    def named_sync(self, number, threads):
        """Arrive, and wait until as many threads have."""
        state = self.named.get(int(number))
        before = state.round if state else 0
        state = self.named_arrive(number, threads, "waits")
        if state.round == before:
            self.now.wait(
                lambda: state.round > before,
                lambda: f"named barrier {number}: {len(state.here) * THREADS} of {threads} threads",
            )
        self.now.add(state.passed_on)

    def set_registers(self, n, more):
        """Return what gives registers back, or waits for them."""
        assert n % 8 == 0 and 24 <= n <= 256

        def change():
            me = self.machine.block.now
            me.acting = THREADS
            return self.machine.block._change_registers(me, n, more)

        return change

    def _change_registers(self, me, n, more):
        needed = THREADS * (n - me.registers)
        if (needed < 0) if more else (needed > 0):
            raise Misuse(f"setmaxnreg to {n} from {me.registers} goes the wrong way")
        if needed > self.free_registers:
            me.wait(
                lambda: needed <= self.free_registers,
                lambda: f"{needed} registers, of which {self.free_registers} are free",
            )
        self.free_registers -= needed
        me.registers = n

    # -- copies -----------------------------------------------------------------------------------
    def _only_one(self):
        if self.now.acting != 1:
            raise Misuse("a whole warpgroup does what one thread should")

    def fence_map(self, address):
        """Let a tensor map be seen."""
        self.now.maps.add(int(address))

    def load_box(self, to, tensor_map, barrier, column, row, head, batch):
        """Start copying a box; zeros come for what lies outside the array."""
        self._only_one()
        if int(tensor_map) not in self.now.maps:
            raise Misuse("a tensor map is used before its fence")
        maps, offset = self.memory.at(tensor_map)
        told = maps[offset // BYTES]
        if to % 1024:
            raise Misuse(f"a swizzled box at byte {to}, which is no multiple of 1024")
        box = np.zeros((told.box_rows, COLUMNS), np.uint16)
        first = [int(np.int32(np.uint32(x))) for x in (batch, head, row, column)]
        array, _ = self.memory.at(told.pointer)
        whole = np.lib.stride_tricks.as_strided(array, told.shape, (*told.strides, 2))
        if first[0] < told.shape[0] and first[1] < told.shape[1] and min(first) >= 0:
            there = whole[first[0], first[1], first[2] : first[2] + told.box_rows]
            there = there[:, first[3] : first[3] + COLUMNS]
            box[: there.shape[0], : there.shape[1]] = there
        where = swizzled(int(to) + np.arange(box.nbytes))
        chunks = self._chunks(where)
        self._may_write(chunks)
        self.under_way[chunks] = True
        load = types.SimpleNamespace(
            where=where, chunks=chunks, bytes=box.view(np.uint8).ravel(), number=self._number(),
            barrier=self._barrier(barrier), told=Knowledge(len(self.warpgroups)),
        )  # fmt: skip
        load.told.arrived.add(load.number)
        self.loads.append(load)
        self.count["bytes"] += box.nbytes

    def _number(self):
        self.copies += 1
        return self.copies

    def _land(self, load):
        self.bytes[load.where] = load.bytes
        self.under_way[load.chunks] = False
        self.copy_of[load.chunks], self.written_by[load.chunks] = load.number, -1
        load.barrier.step(0, -len(load.bytes), load.told)

    def copy16(self, to, source, size):
        """Start the copy of 16 bytes by each thread; it arrives at a wait."""
        to, size = self.full(to, np.int64), self.full(size, np.int64)
        memory, offset = self._bytes(source)
        data = np.zeros((THREADS, 16), np.uint8)
        real = size == 16
        assert (
            (to % 16 == 0).all() and (offset[real] % 16 == 0).all() and (real | (size == 0)).all()
        )
        assert offset[real].max(initial=0) < len(memory), "outside the array"
        data[real] = memory[offset[real][:, None] + np.arange(16)]
        chunks = self._chunks(to)
        assert len(chunks) == THREADS, "two threads copy to one place"
        self._may_write(chunks)
        self.under_way[chunks] = True
        self.now.copies[-1].append((to, data, chunks))
        self.count["bytes"] += 16 * THREADS

    def copy_commit(self):
        """Close a group of copies."""
        self.now.copies.append([])

    def copy_wait(self):
        """Let all closed groups of copies arrive."""
        self._arrive_copies(0)

    def copy_wait_but_one(self):
        """Let all closed groups of copies arrive, but the last."""
        self._arrive_copies(1)

    def _arrive_copies(self, pending):
        *closed, still_open = self.now.copies
        here = max(0, len(closed) - pending)
        for to, data, chunks in itertools.chain.from_iterable(closed[:here]):
            self.bytes[to[:, None] + np.arange(16)] = data
            self.under_way[chunks], self.unfenced[chunks] = False, True
            self.copy_of[chunks], self.written_by[chunks] = self._number(), self.now.number
            self.written_at[chunks] = self.now.clock[self.now.number]
        self.now.copies = [*closed[here:], still_open]

    def fence_writes(self):
        """Let `wgmma` see what this warpgroup wrote."""
        self.unfenced[self.written_by == self.now.number] = False

    # -- products ---------------------------------------------------------------------------------
    def descriptor_bits(self, leading, stride):
        """Return a descriptor without its address."""
        from flashref.cuda import ptx_hopper

        return ptx_hopper.descriptor_bits(leading, stride)

    def wgmma_shared(self, N, half, overwrite=False, negative=False):
        """Return D = D + A B for A and B in shared memory."""

        def product(D, a, b):
            block = self.machine.block
            places = elements_by_rows(a, 64), elements_by_rows(b, N)
            A, B = (block._halves(x, half) for x in places)
            block._start(D, -A if negative else A, B.T, overwrite, places)

        return product

    def wgmma_registers(self, N, half):
        """Return D = D + A B for A in registers and B by columns."""

        def product(D, a0, a1, a2, a3, b):
            block, a = self.machine.block, (a0, a1, a2, a3)
            unpack = emulator.unpack_f16 if half == "float16" else emulator.unpack_bf16
            A = np.empty((64, 16), np.float32)
            for r, x in enumerate(a):
                for e, floats in enumerate(unpack(block.full(x, np.uint32))):
                    A[THREAD // 32 * 16 + G + r % 2 * 8, 2 * T + r // 2 * 8 + e] = floats
            places = elements_by_columns(b, N)
            used = [R for R in block.now.arrays if any(x is y for x in a for y in R.values)]
            block._start(D, A, block._halves(places, half), False, (places,), used)

        return product

    def _halves(self, places, half):
        """Return the halves at these addresses as floats."""
        self._inside(places)
        bits = self.bytes.view(np.uint16)[places // 2]
        if half == "float16":
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def _start(self, D, A, B, overwrite, places, used=()):
        """Note D = D + A B: nobody can tell until it has been waited for."""
        chunks = np.unique(np.concatenate([self._chunks(x) for x in places]))
        self._may_read(chunks)
        if any(R.fresh for R in (D, *used)):
            raise Misuse("a wgmma uses registers written since the last wgmma.fence")
        N = B.shape[1]
        rows, columns = accumulator(N)
        result = A @ B
        if not overwrite:
            old = D.result if D.result is not None else np.array([self.full(x) for x in D.values])
            result[rows, columns] += old
        D.result = result[rows, columns]
        for R in (D, *used):
            R.unfinished += 1
        self.now.open.append(types.SimpleNamespace(D=D, used=used, chunks=chunks))
        self.count["wgmma"] += 1

    def wgmma_fence(self):
        """Let the products that follow see the registers."""
        for R in self.now.arrays:
            R.fresh = False

    def wgmma_commit(self):
        """Close a group of products."""
        self.now.groups.append(self.now.open)
        self.now.open = []

    def wait_products(self, pending, count):
        """Return what waits until at most `pending` groups are unfinished, and takes D along."""

        def wait(D):
            block = self.machine.block
            me = block.now
            while len(me.groups) > pending:
                for product in me.groups.pop(0):
                    block._finish(product)
            if D.result is not None:
                raise Misuse("waits for fewer products than its registers need")
            assert len(D.values) == count
            D.hidden = False

        return wait

    def _finish(self, product):
        me, D = self.now, product.D
        self.read_at[me.number, product.chunks] = me.clock[me.number]
        for R in (D, *product.used):
            R.unfinished -= 1
        if not D.unfinished:
            D.values, D.result, D.hidden = list(D.result), None, True


# -- where things lie: see `ptx_hopper` -----------------------------------------------------------
def swizzled(address):
    """Return where the 128-byte swizzle puts a byte: chunk c of line r at c ^ (r % 8)."""
    return address ^ (address >> 7 & 7) << 4


def accumulator(N):
    """Return row and column of each register of each thread: two arrays (N / 2, 128)."""
    register = np.arange(N // 2)[:, None]
    rows = THREAD // 32 * 16 + G + register % 4 // 2 * 8
    return rows, register // 4 * 8 + 2 * T + register % 2


def fields(descriptor):
    """Return address, leading and other stride in bytes."""
    d = int(descriptor)
    if d >> 62 != 1:
        raise Misuse("a descriptor without the 128-byte swizzle, the only one that is known here")
    if d >> 49 & 7:
        raise Misuse("a base offset, although tiles start at multiples of 1024")
    return (d & 0x3FFF) << 4, (d >> 16 & 0x3FFF) << 4, (d >> 32 & 0x3FFF) << 4


def elements_by_rows(descriptor, n):
    """Return the addresses of n rows × 16 elements, of a tile whose columns are summed over."""
    start, _, stride = fields(descriptor)
    row, column = np.arange(n)[:, None], np.arange(16)
    return swizzled(start + row // 8 * stride + row % 8 * 128 + column * 2)


def elements_by_columns(descriptor, n):
    """Return the addresses of 16 rows × n elements, of a tile whose rows are summed over."""
    start, leading, stride = fields(descriptor)
    row, column = np.arange(16)[:, None], np.arange(n)
    lines = start + row // 8 * stride + row % 8 * 128
    return swizzled(lines + column // 64 * leading + column % 64 * 2)
