"""Tensor maps: how Hopper's TMA is told, once and by the host, where the tiles of an array lie.

A kernel then asks for a tile by its coordinates, with one instruction of one thread: no addresses,
no guards. TMA cuts at the edges of the array, where zeros come in place of what is not there, and
lays each line of 128 bytes down swizzled: chunk c (16 bytes) of line r at place c ^ (r % 8).

In CUDA C++ a map is a kernel's parameter (`__grid_constant__`). Numba passes numbers and arrays
only, so here it lies in device memory, and the kernel needs a fence before it (`fence_map`).
"""

import functools
from dataclasses import dataclass

import numpy as np

BYTES = 128  # of a tensor map
COLUMNS = 64  # of a box: with 2 bytes each, the 128 bytes that a swizzled line has
MOST_ROWS = 256  # of a box


@dataclass(frozen=True)
class TensorMap:
    """An array (batch, heads, rows, columns) of halves, of which boxes rows × 64 are copied.

    Parameters
    ----------
    pointer : int
        Address of the first element, a multiple of 16.
    half : {"float16", "bfloat16"}
    shape : tuple of 4 positive int
        Rows beyond shape[2] and columns beyond shape[3] arrive as zeros, whatever lies there.
    strides : tuple of 3 int
        Bytes from one batch element, head and row to the next: multiples of 16, below 2**40.
    box_rows : int
        At most 256.
    """

    pointer: int
    half: str
    shape: tuple
    strides: tuple
    box_rows: int

    def __post_init__(self):
        """Refuse what TMA would refuse, in words."""
        walks = [s for s, n in zip(self.strides, self.shape, strict=False) if n > 1]
        if min(self.shape) < 1 or not 1 <= self.box_rows <= MOST_ROWS:
            raise ValueError(f"no tensor map for {self}: empty, or boxes of more than 256 rows")
        if self.pointer % 16 or any(not steps_forward(s) for s in walks):
            raise ValueError(f"no tensor map for {self}: strides must be multiples of 16 above 0")

    def encode(self, driver):
        """Return the map as TMA reads it: 128 bytes, made by cuda.bindings.driver."""
        row = self.strides[2] if self.shape[2] > 1 else 16
        # an axis of length 1 has a stride, too: any that is allowed
        steps = [s if n > 1 else row for s, n in zip(self.strides, self.shape, strict=False)]
        u64, u32 = driver.cuuint64_t, driver.cuuint32_t
        types = driver.CUtensorMapDataType
        kind = {
            "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        }[self.half]
        status, opaque = driver.cuTensorMapEncodeTiled(
            kind, 4, self.pointer, [u64(n) for n in reversed(self.shape)],
            [u64(s) for s in reversed(steps)], [u32(n) for n in (COLUMNS, self.box_rows, 1, 1)],
            [u32(1)] * 4, driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # that is, zeros
        )  # fmt: skip
        if status != driver.CUresult.CUDA_SUCCESS:
            raise ValueError(f"the driver makes no tensor map of {self}: {status.name}")
        return np.array([int(word) for word in opaque.opaque], np.uint64).view(np.uint8)


def map_of(x, pointer, half, rows, box_rows):
    """Return what makes the TensorMap of the first `rows` rows of each head of an array."""
    return pointer, half, (*x.shape[:2], rows, x.shape[3]), tuple(x.strides[:3]), box_rows


def steps_forward(stride):
    """Return whether TMA can walk along an axis of this stride, in bytes."""
    return stride % 16 == 0 and 0 < stride < 2**40


@functools.lru_cache(1024)
def on_card(device_id, maps):
    """Return tensor maps, as of `map_of`, in the card's memory: made when they are new.

    The copy is there before this returns, whatever stream a kernel will read it on.
    """
    from cuda.bindings import driver
    from numba import cuda

    copied = cuda.to_device(np.concatenate([TensorMap(*x).encode(driver) for x in maps]))
    cuda.default_stream().synchronize()
    return copied
