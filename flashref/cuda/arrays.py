"""Arrays in and out: the GPU's are used where they lie, those of main memory are copied.

A GPU array is told by DLPack, else by `__cuda_array_interface__`; what it says is read into a
`Described`, from which a `View` is made for the kernels without asking the library again. float16
and bfloat16 travel as 16-bit integers: the kernels that take them handle addresses, not numbers.
"""

import ctypes
import itertools
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from flashref.inputs import any_array

BITS = {"float32": "<f4", "float16": "<u2", "bfloat16": "<u2"}  # how Numba sees each dtype
_GPU = (2, 13)  # DLPack's numbers for CUDA memory, managed memory
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


@dataclass(frozen=True)
class Described:
    """Where an array lies: strides in bytes; `owner` keeps the memory alive."""

    pointer: int
    shape: tuple
    strides: tuple
    dtype: str
    device: int | None
    owner: Any

    @property
    def ndim(self):
        """Return the number of axes."""
        return len(self.shape)


@dataclass(frozen=True)
class View:
    """GPU memory as a kernel sees it: strides in bytes; `owner` keeps the memory alive."""

    pointer: int
    shape: tuple
    strides: tuple
    typestr: str
    owner: Any

    @property
    def __cuda_array_interface__(self):
        """Say the same to Numba, where it launches the kernel itself."""
        return {
            "data": (self.pointer, False), "shape": self.shape, "strides": self.strides,
            "typestr": self.typestr, "version": 3,
        }  # fmt: skip


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _place(x):
    """Return whether x is an array in GPU memory, and on which GPU; None if it does not say."""
    if hasattr(x, "__dlpack_device__"):
        kind, number = x.__dlpack_device__()
        return kind in _GPU, number
    return hasattr(x, "__cuda_array_interface__"), None


def _from_capsule(capsule, x):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(get(capsule, b"dltensor"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    itemsize = tensor.bits * tensor.lanes // 8
    if tensor.strides:
        strides = tuple(tensor.strides[i] * itemsize for i in range(tensor.ndim))
    else:
        strides = contiguous_strides(shape, itemsize)
    kind = _DLPACK_KINDS.get(tensor.code, f"DLPack type {tensor.code} of ")
    dtype = "bool" if kind == "bool" else f"{kind}{tensor.bits * tensor.lanes}"
    pointer = (tensor.data or 0) + tensor.byte_offset
    # the capsule frees its share of the memory when it goes
    return Described(pointer, shape, strides, dtype, tensor.device_id, (capsule, x))


def _from_interface(x):
    told = x.__cuda_array_interface__
    dtype, shape = np.dtype(told["typestr"]), tuple(told["shape"])
    if not dtype.isnative:
        raise TypeError(f"an array on the GPU has dtype {dtype.str}: its bytes are swapped")
    strides = told.get("strides") or contiguous_strides(shape, dtype.itemsize)
    return Described(told["data"][0] or 0, shape, tuple(strides), dtype.name, None, x)


def contiguous_strides(shape, itemsize):
    """Return the strides, in bytes, of a C-contiguous array."""
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def merged(name, shape, strides, axes):
    """Return shape and strides with `axes` axes: the first of them stands for all batch axes."""
    if len(shape) == axes:
        return shape, strides
    shape, strides = (1,) * (axes - len(shape)) + shape, (0,) * (axes - len(strides)) + strides
    split = len(shape) - axes + 1
    batch = [(n, s) for n, s in zip(shape[:split], strides[:split], strict=True) if n != 1]
    for (_, outer), (n, inner) in itertools.pairwise(batch):
        if outer != n * inner:
            raise ValueError(
                f"{name} has shape {shape} and strides {strides}: its batch axes cannot be seen "
                f"as one; make it contiguous"
            )
    stride = batch[-1][1] if batch else 0
    return (math.prod(n for n, _ in batch), *shape[split:]), (stride, *strides[split:])


class HostArrays:
    """Arrays of main memory: copied to the GPU, and results back."""

    stream, device = 0, None

    def describe(self, name, x):
        """Return the `Described` of an array, made contiguous."""
        x = np.ascontiguousarray(any_array(name, x))
        x = x.astype(x.dtype.newbyteorder("="), copy=False)  # a card reads its own byte order
        return Described(0, x.shape, x.strides, x.dtype.name, None, x)

    def view(self, name, described, axes):
        """Return a copy on the GPU, with `axes` axes."""
        shape, _ = merged(name, described.shape, described.strides, axes)
        return cuda.to_device(described.owner.reshape(shape).view(BITS[described.dtype]))

    def empty(self, shape, dtype):
        """Return a new array on the GPU."""
        return cuda.device_array(shape, BITS[dtype])

    def view_of_new(self, x, axes):
        """Return a new array with `axes` axes."""
        shape, _ = merged("result", x.shape, contiguous_strides(x.shape, 1), axes)
        return x.reshape(shape)

    def home(self, x, like):
        """Return a result in main memory, in the dtype of `like` if it holds halves."""
        x = x.copy_to_host()
        return x if x.dtype == np.float32 else x.view(like.owner.dtype)


class GpuArrays:
    """Arrays on the GPU, and of a library that is not known by name: results are Numba's."""

    def __init__(self, device):
        self.device, self.stream = device, 0

    def describe(self, name, x):
        """Return the `Described` of an array, ready for use on the stream."""
        if not hasattr(x, "__dlpack__"):
            return _from_interface(x)
        try:
            return _from_capsule(x.__dlpack__(stream=self.stream or 1), x)  # 1: default stream
        except (BufferError, RuntimeError) as error:  # PyTorch refuses what requires grad
            raise TypeError(f"{name} cannot be shared by DLPack: {error}") from error

    def view(self, name, described, axes):
        """Return a view of an array, with `axes` axes."""
        shape, strides = merged(name, described.shape, described.strides, axes)
        pointer, typestr = described.pointer, BITS[described.dtype]
        return View(pointer, shape, strides, typestr, described.owner)

    def empty(self, shape, dtype):
        """Return a new array on the GPU; Numba knows no bfloat16 and holds its bits."""
        return cuda.device_array(shape, "uint16" if dtype == "bfloat16" else dtype)

    def view_of_new(self, x, axes):
        """Return a view of a new array, with `axes` axes."""
        return self.view("result", self.describe("result", x), axes)

    def home(self, x, like):
        """Return a result: it is where it belongs."""
        return x


class TorchArrays(GpuArrays):
    """PyTorch's arrays, on its current stream."""

    def __init__(self, device):
        import torch

        self.torch, self.device = torch, device
        self.stream = torch.cuda.current_stream(device).cuda_stream

    def describe(self, name, x):
        """Return the `Described` of a tensor: asked directly, since its DLPack takes 30 µs."""
        if x.requires_grad:
            raise TypeError(f"{name} requires grad, and kernels know no autograd; detach it")
        x = x.resolve_neg()  # a view whose numbers stand for their negatives: rare, and then a copy
        size = x.element_size()
        strides, dtype = tuple(size * s for s in x.stride()), str(x.dtype).removeprefix("torch.")
        return Described(x.data_ptr(), tuple(x.shape), strides, dtype, self.device, x)

    def empty(self, shape, dtype):
        """Return a new tensor on the GPU."""
        dtype = getattr(self.torch, dtype)
        return self.torch.empty(shape, dtype=dtype, device=f"cuda:{self.device}")


class CupyArrays(GpuArrays):
    """CuPy's arrays, on its current stream."""

    def __init__(self, device):
        import cupy

        self.cupy, self.device = cupy, device
        with cupy.cuda.Device(device):
            self.stream = cupy.cuda.get_current_stream().ptr

    def empty(self, shape, dtype):
        """Return a new CuPy array."""
        with self.cupy.cuda.Device(self.device):
            return self.cupy.empty(shape, dtype)


def library_of(named):
    """Return how to handle the named arrays; refuse those that lie apart."""
    places = {name: _place(x) for name, x in named.items()}
    on_gpu = {name: place[0] for name, place in places.items()}
    if not any(on_gpu.values()):
        return HostArrays()
    if not all(on_gpu.values()):
        where = ", ".join(f"{n} {'on a GPU' if g else 'in main memory'}" for n, g in on_gpu.items())
        raise ValueError(f"the arrays lie apart: {where}; bring them together")
    devices = {name: place[1] for name, place in places.items() if place[1] is not None}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {number}" for name, number in devices.items())
        raise ValueError(f"the arrays lie on different GPUs: {where}; bring them to one")
    device = next(iter(devices.values()), None)
    roots = {type(x).__module__.partition(".")[0] for x in named.values()}
    for root, kind in (("torch", TorchArrays), ("cupy", CupyArrays)):
        if roots == {root} and root in sys.modules:
            return kind(device)
    return GpuArrays(device)
