"""The one way from a caller's arrays to a running kernel and back.

Checks the arguments, makes 4-D views (batch, heads, n, d) of the arrays, picks the rung and the
blocks that fit the card, compiles each kernel once per card, and launches on the caller's stream.

All rungs express causality by one number: query i sees the keys below i + 1 + offset, and below
n_k. offset = n_k - n_q is bottom-right causal, 0 top-left, and n_k hides nothing.
"""

import ctypes
import functools
import importlib
import math
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flashref.cuda import arrays, device, tma
from flashref.cuda.arrays import View
from flashref.cuda.block_mask import BlockMask
from flashref.cuda.device import GpuError
from flashref.heads import Options, check_heads, check_rules

cuda = device.import_cuda()  # before anything of numba: it says in words what is missing

from numba import types  # noqa: E402

F32, I32 = types.float32, types.int32
F32_3D, F32_4D = types.Array(F32, 3, "A"), types.Array(F32, 4, "A")
HALF_4D = types.Array(types.uint16, 4, "A")  # float16 or bfloat16: kernels see addresses only
MAPS = types.Array(types.uint8, 1, "A")  # tensor maps, one after the other: see `tma`
TILE_LISTS = (types.Array(I32, 1, "A"), types.Array(I32, 1, "A"), I32)  # see `block_mask`

HALVES = ("float16", "bfloat16")


class Rung(NamedTuple):
    """What a rung can take."""

    dtypes: tuple
    capability: tuple = (0, 0)  # of the card, at least
    columns: float = math.inf  # at most
    copies_16_bytes: bool = False  # at once: rows start and end at multiples
    only: bool = False  # its code is for cards of this capability alone


RUNGS = {  # slowest first
    "naive": Rung(("float32",)),
    "tiled": Rung(("float32",), columns=128),
    "registers": Rung(("float32",), columns=128, copies_16_bytes=True),
    "tensor_core": Rung(HALVES, (8, 0), 128, copies_16_bytes=True),
    "hopper": Rung(HALVES, (9, 0), 256, copies_16_bytes=True, only=True),
}
FALLBACK = {"hopper": "tensor_core"}  # what runs, with a warning, where a rung cannot
WITH_PTX = ("tensor_core", "hopper")
BACKWARD = ("tiled", "tensor_core")
STATIC_SHARED = 48 * 1024  # what a block gets without asking
MAX_GRID = (2**31 - 1, 65535, 65535)
MOST_SCALE = 2.3e38  # kernels take float32, and some of them multiply by log₂ e first


def cdiv(a, b):
    """Return ⌈a / b⌉."""
    return -(-a // b)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel as Python: its function, the Numba types of its arguments, and what it takes."""

    function: Callable
    arguments: tuple
    threads: int | tuple
    shared_bytes: int = 0  # dynamic; static shared memory stands in the function
    rows: int = 0  # rows that a block owns: queries, or keys in a backward pass over keys
    columns: int = 0  # rows of the tiles that it walks over
    name: str = ""  # of the blocks, for error messages
    per_processor: int | None = None  # blocks that a multiprocessor must hold at once, at least

    @property
    def launch_bounds(self):
        """Return the threads of a block: the compiler gives each what registers that leaves."""
        threads = self.threads if isinstance(self.threads, int) else math.prod(self.threads)
        return (threads, self.per_processor) if self.per_processor else threads


@dataclass
class Run:
    """One call: where it runs, and what its launches share. A rung gets one as `run`."""

    library: Any
    dtype: str = "float32"
    shared_limit: int = STATIC_SHARED
    blocks: Any = None  # a rung's own block sizes, in place of its choice
    tiles: BlockMask | None = None  # which tiles are there; None is all
    device_id: int | None = None  # None in the simulator
    multiprocessors: int = 1
    capability: tuple = (0, 0)  # of the card
    deterministic: bool = False  # whether a backward pass must add up in one order

    def empty(self, shape):
        """Return a float32 array for the rung's own use."""
        return self.library.view_of_new(self.library.empty(shape, "float32"), len(shape))

    def lists(self, own, rows):
        """Return what a kernel takes for its TILE_LISTS: see `BlockMask.lists`."""
        on_card = _uploaded(self.device_id, self.tiles.lists(own, rows))
        return *on_card, self.tiles.blocks(own)[0]

    def tensor_maps(self, *boxes):
        """Return the tensor maps of (array, rows of it, rows of a box): a kernel's MAPS."""
        maps = (tma.map_of(x, _address(x), self.dtype, *rows) for x, *rows in boxes)
        return tma.on_card(self.device_id, tuple(maps))

    def first_that_fits(self, kernels):
        """Return the first kernel whose shared memory this card can give to a block."""
        for kernel in kernels:
            if kernel.shared_bytes <= self.shared_limit:
                return kernel
        needs = "; ".join(f"{k.name} needs {k.shared_bytes} bytes" for k in kernels)
        raise GpuError(
            f"too little shared memory: a block of this card can have {self.shared_limit} bytes, "
            f"and of the blocks (queries × keys) {needs}"
        )

    def __call__(self, kernel, grid, *values):
        """Launch the kernel on the call's stream; an empty grid launches nothing."""
        if 0 in grid:
            return
        for n, most, axis in zip(grid, MAX_GRID, "xyz", strict=True):
            if n > most:
                raise ValueError(
                    f"the launch needs {n} blocks along {axis}, where CUDA allows {most}: of its "
                    f"axes, two are heads and batch, and one tiles of rows (z, if causal); split "
                    f"the batch, or the sequence"
                )
        self.first_that_fits([kernel])
        launch = _compiled(kernel, self.device_id)
        launch(grid, self.library.stream, values)


@functools.lru_cache(64)
def _uploaded(device_id, lists):
    """Return lists of tiles on the card; a mask that comes again finds them there."""
    on_card = tuple(cuda.to_device(x) for x in lists)
    cuda.default_stream().synchronize()  # whatever stream a kernel reads them on
    return on_card


@functools.cache
def _compiled(kernel, device_id):
    """Return the kernel compiled for the current card, as what launches it."""
    if device_id is None:
        return _ByNumba(cuda.jit(kernel.function), kernel)
    options = {"fastmath": True}
    if device.has_numba_cuda():
        options["launch_bounds"] = kernel.launch_bounds
    signature = types.void(*kernel.arguments)
    try:
        compiled = cuda.jit(signature, **options)(kernel.function)
        return (_ByDriver if device.has_numba_cuda() else _ByNumba)(compiled, kernel)
    except Exception as error:
        reason = device.explain(error)
        raise GpuError(f"{kernel.function.__name__} cannot be compiled: {reason}") from error


class _ByNumba:
    """Launches a kernel as Numba does: in the simulator, and where numba-cuda is not installed."""

    def __init__(self, compiled, kernel):
        if kernel.shared_bytes > STATIC_SHARED and not device.simulated():
            raise GpuError(
                "more than 48 KiB of shared memory needs numba-cuda: pip install 'flashref[gpu]'"
            )
        self.compiled, self.kernel = compiled, kernel

    def __call__(self, grid, stream, values):
        stream = cuda.external_stream(stream) if stream else 0
        values = [cuda.as_cuda_array(x) if isinstance(x, View) else x for x in values]
        self.compiled[grid, self.kernel.threads, stream, self.kernel.shared_bytes](*values)


class _ByDriver:
    """Launches a kernel by one call of the driver: by way of Numba it takes 20 times as long.

    A kernel of Numba's takes an array as 5 + 2 ndim numbers: its memory's owner, its parent, its
    size and its item size, of which these kernels use none; where it is, its shape, its strides.
    """

    def __init__(self, compiled, kernel):
        from cuda.bindings import driver

        self.driver = driver
        (loaded,) = compiled.overloads.values()
        loaded.bind()
        handle = loaded._codelibrary.get_cufunc().handle
        if kernel.shared_bytes > STATIC_SHARED:  # nobody else asks for more than 48 KiB
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            bytes_and_card = kernel.shared_bytes, handle, _current().id
            _succeed(driver, driver.cuKernelSetAttribute(attribute, *bytes_and_card))
        self.function = _succeed(driver, driver.cuKernelGetFunction(handle))
        threads = kernel.threads if isinstance(kernel.threads, tuple) else (kernel.threads,)
        self.threads = (*threads, 1, 1)[:3]
        self.shared_bytes, self.owner = kernel.shared_bytes, compiled
        formats = {F32: "f4x", I32: "i4x"}  # a place of 8 bytes for each
        places = [formats.get(t) or (5 + 2 * t.ndim) * "q" for t in kernel.arguments]
        self.places = struct.Struct("<" + "".join(places))
        self.pointers = ctypes.c_void_p * (self.places.size // 8)

    def __call__(self, grid, stream, values):
        numbers = []
        for x in values:
            if isinstance(x, int | float):
                numbers.append(x)
            else:
                numbers += (0, 0, 0, 0, _address(x), *x.shape, *x.strides)
        packed = ctypes.create_string_buffer(self.places.pack(*numbers), self.places.size)
        first = ctypes.addressof(packed)
        pointers = self.pointers(*range(first, first + self.places.size, 8))
        _succeed(
            self.driver,
            self.driver.cuLaunchKernel(
                self.function, *grid, *self.threads, self.shared_bytes, stream,
                ctypes.addressof(pointers), 0,
            ),
        )  # fmt: skip


def _succeed(driver, answer):
    """Return what a call of the driver returned, or raise what it says."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise GpuError(
            f"the driver says {status.name}: {device.explain(RuntimeError(status.name))}"
        )
    return values[0] if values else None


def _address(x):
    """Return where a view lies, or an array of Numba's own."""
    return x.pointer if isinstance(x, View) else x.__cuda_array_interface__["data"][0]


def _current():
    return cuda.get_current_device()


def _limits(gpu):
    """Return what a card can do, as fields of a Run."""
    return {
        "device_id": gpu.id, "shared_limit": device.shared_limit(gpu),
        "multiprocessors": gpu.MULTIPROCESSOR_COUNT, "capability": tuple(gpu.compute_capability),
    }  # fmt: skip


def inline(function):
    """Return a device function that is compiled into the place of each call."""
    if device.simulated():
        return cuda.jit(device=True)(function)
    if device.has_numba_cuda():
        return cuda.jit(device=True, forceinline=True, fastmath=True)(function)
    return cuda.jit(device=True, fastmath=True)(function)


# -- the public functions -------------------------------------------------------------------------
def forward(q, k, v, scale, causal, return_lse, kernel, blocks=None):
    """Answer `flashref.cuda.flash_attention_2`; `blocks` replaces the rung's own choice."""
    call = _Call({"q": q, "k": k, "v": v}, scale, causal, kernel, tuple(RUNGS))
    o, lse = call.run("forward", ("q", "k", "v"), (call.o_shape, call.o_shape[:-1]), blocks)
    return (o, lse) if return_lse else o


def backward(do, q, k, v, o, lse, scale, causal, kernel, blocks=None, deterministic=False):
    """Answer `flashref.cuda.flash_attention_2_backward`; `blocks` as in `forward`."""
    _check_flag("deterministic", deterministic)
    named = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    return _Call(named, scale, causal, kernel, BACKWARD).run_backward(deterministic, blocks)


def sparse_forward(q, k, v, block_mask, block_q, block_k, scale, causal, return_lse):
    """Answer `flashref.cuda.block_sparse_attention`."""
    mask = block_mask, block_q, block_k
    call = _Call({"q": q, "k": k, "v": v}, scale, causal, *_SPARSE, mask)
    o, lse = call.run("forward", ("q", "k", "v"), (call.o_shape, call.o_shape[:-1]), None)
    return (o, lse) if return_lse else o


def sparse_backward(
    do, q, k, v, o, lse, block_mask, block_q, block_k, scale, causal, deterministic=False
):
    """Answer `flashref.cuda.block_sparse_attention_backward`."""
    _check_flag("deterministic", deterministic)
    named = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    mask = block_mask, block_q, block_k
    return _Call(named, scale, causal, *_SPARSE, mask).run_backward(deterministic)


def _check_flag(name, value):
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}={value!r} must be True or False")


_SPARSE = "tensor_core", ("tensor_core",)  # the only rung that reads a block mask


class _Call:
    """The checked arguments of a call, where they lie, and the way home."""

    def __init__(self, named, scale, causal, kernel, rungs, mask=None):
        self.library = arrays.library_of(named)
        self.of = {name: self.library.describe(name, x) for name, x in named.items()}
        q, k, v = (self.of[name] for name in "qkv")
        for name in "qkv":
            if self.of[name].ndim < 2:
                shape = self.of[name].shape
                raise ValueError(f"{name} has shape {shape}; it needs (n, d) or (..., heads, n, d)")
        lead, self.n_q, self.n_k = check_heads(q, k, v)
        self.o_shape = (*lead, self.n_q, v.shape[-1])
        rules = check_rules(Options(scale=scale, causal=causal), q.shape[-1])
        self.scale, self.causal = rules["scale"], rules["causal"]
        if abs(self.scale) > MOST_SCALE:
            raise ValueError(f"scale={self.scale!r} must be within ±{MOST_SCALE:g} on a GPU")
        for name, shape in (("do", self.o_shape), ("o", self.o_shape), ("lse", self.o_shape[:-1])):
            if name in named and self.of[name].shape != shape:
                raise ValueError(f"{name} has shape {self.of[name].shape}; q and v ask for {shape}")
        self.tiles = None if mask is None else BlockMask(*mask, self.n_q, self.n_k)
        self.simulated = device.simulated()
        self.rung = _choose_rung(kernel, rungs, self.of, self.card_objection)
        if self.simulated and self.rung in WITH_PTX:
            raise GpuError(
                f"Numba's simulator knows no PTX, so it cannot run {self.rung}: give float32 for "
                f"the other rungs, or see flashref.cuda.emulator"
            )

    @functools.cached_property
    def gpu(self):
        """The card on which the arrays lie, made the current one; Numba is asked once a call."""
        gpu, asked = _current(), self.library.device
        if asked is None or asked == gpu.id:
            return gpu
        cuda.select_device(asked)  # its primary context: libraries share it
        return _current()

    def card_objection(self, rung):
        """Return why the card cannot run a rung, or None; raise if this machine can run none."""
        if self.simulated:
            return None
        try:
            capability = tuple(self.gpu.compute_capability)
        except Exception as error:
            raise GpuError(device.explain(error)) from error
        least, only = RUNGS[rung].capability, RUNGS[rung].only
        if capability < least or (only and capability != least):
            return (
                f"needs {'exactly ' * only}compute capability {least[0]}.{least[1]}; this card has "
                f"{capability[0]}.{capability[1]}"
            )
        if rung in WITH_PTX and not device.has_numba_cuda():
            raise GpuError(f"kernel={rung!r} needs numba-cuda: pip install 'flashref[gpu]'")
        return None

    def run_backward(self, deterministic, blocks=None):
        """Return dq, dk, dv."""
        shapes = [self.of[name].shape for name in "qkv"]
        names = "do", "q", "k", "v", "o", "lse"
        return self.run("backward", names, shapes, blocks, bool(deterministic))

    def run(self, direction, names, shapes, blocks, deterministic=False):
        """Run the rung on the named inputs; return new arrays of the given shapes."""
        dtypes = [
            "float32" if shape == self.o_shape[:-1] else self.of["q"].dtype for shape in shapes
        ]
        results = [self.library.empty(s, t) for s, t in zip(shapes, dtypes, strict=True)]
        axes = {name: 3 if name == "lse" else 4 for name in names}
        if math.prod(self.of["q"].shape[:-2]) > 0:
            inputs = [self.library.view(name, self.of[name], axes[name]) for name in names]
            outputs = [
                self.library.view_of_new(x, 3 if shape == self.o_shape[:-1] else 4)
                for x, shape in zip(results, shapes, strict=True)
            ]
            offset = {True: self.n_k - self.n_q, "top-left": 0, False: self.n_k}[self.causal]
            rung = importlib.import_module(f"flashref.cuda.{self.rung}")
            limits = {"shared_limit": 2**31} if self.simulated else _limits(self.gpu)
            run = Run(
                self.library, self.of["q"].dtype, blocks=blocks, tiles=self.tiles,
                deterministic=deterministic, **limits,
            )  # fmt: skip
            getattr(rung, direction)(run, *inputs, *outputs, self.scale, offset)
        return tuple(self.library.home(x, self.of["q"]) for x in results)


def _choose_rung(kernel, rungs, of, card_objection=lambda rung: None):
    """Return the fastest rung for the arrays and the card, or say in words why there is none."""
    if kernel != "auto" and kernel not in rungs:
        raise ValueError(f"kernel={kernel!r} must be one of {', '.join(('auto', *rungs))}")
    shown = ", ".join(f"{name} {x.dtype}" for name, x in of.items())
    dtype = of["q"].dtype
    if any(x.dtype != ("float32" if name == "lse" else dtype) for name, x in of.items()):
        raise TypeError(f"the arrays must have one dtype, and lse float32; these are {shown}")
    candidates = [rung for rung in reversed(rungs) if kernel in ("auto", rung)]
    fitting = [rung for rung in candidates if dtype in RUNGS[rung].dtypes]
    if not fitting:
        what = "; ".join(f"{rung} takes {' or '.join(RUNGS[rung].dtypes)}" for rung in candidates)
        raise TypeError(f"the arrays are {shown}; {what}")
    objections, error = {}, GpuError
    for rung in fitting:
        if (objection := _objection(rung, of)) is not None:
            error = ValueError  # other arrays would do
        elif (objection := card_objection(rung)) is None:
            return rung
        objections[rung] = objection
    said = "; ".join(f"kernel={rung!r} {why}" for rung, why in objections.items())
    if kernel in FALLBACK:
        try:
            instead = _choose_rung(FALLBACK[kernel], rungs, of, card_objection)
        except (ValueError, GpuError) as trouble:
            raise type(trouble)(f"{said}; {trouble}") from None
        text = f"{said}; {instead} runs instead"
        warnings.warn(text, device.FallbackWarning, stacklevel=5)  # where the caller's call stands
        return instead
    raise error(said)


def _objection(rung, of):
    """Return why a rung cannot take arrays of this shape and layout, or None."""
    most, q, v = RUNGS[rung].columns, of["q"], of["v"]
    if max(q.shape[-1], v.shape[-1]) > most:
        return f"takes at most {most} columns; these are q {q.shape}, v {v.shape}"
    for name in ("q", "k", "v", "do", "o") if RUNGS[rung].copies_16_bytes else ():
        if name not in of:
            continue
        x = of[name]
        itemsize = 4 if x.dtype == "float32" else 2
        if x.shape[-1] * itemsize % 16:
            return (
                f"copies 16 bytes at a time; {name} has shape {x.shape}: pad its last axis with "
                f"zeros to a multiple of {16 // itemsize} (and keep the old scale)"
            )
        if 0 in x.shape:
            continue
        steps = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
        if x.strides[-1] != itemsize or x.pointer % 16 or any(s % 16 for s in steps):
            return (
                f"copies 16 bytes at a time; the rows of {name} are not contiguous or do not "
                f"start at multiples of 16 bytes: make it contiguous"
            )
        if rung == "hopper" and not all(map(tma.steps_forward, steps)):
            return (
                f"copies by TMA, which walks forward; the strides of {name} are {x.strides} bytes"
            )
    return None
