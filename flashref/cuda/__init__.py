"""The GPU ladder: FlashAttention as CUDA kernels written in Python, each rung one idea faster.

`naive` → `tiled` → `registers` → `tensor_core` → `hopper`: read the modules in this order. Without
a GPU, the first three run in Numba's simulator (`NUMBA_ENABLE_CUDASIM=1`, set before numba is
imported), and `emulator` and `emulator_hopper` run the others in NumPy. `status()` says what this
machine can do.

Importing this package imports no numba; the first call does.
"""

from flashref.cuda.device import status

__all__ = [
    "block_sparse_attention", "block_sparse_attention_backward", "flash_attention_2",
    "flash_attention_2_backward", "status",
]  # fmt: skip


def flash_attention_2(q, k, v, *, scale=None, causal=False, return_lse=False, kernel="auto"):
    """Return exact attention, computed on the GPU by one of the ladder's kernels.

    Nothing of size n_q × n_k is stored, except by `naive`. GPU arrays are read where they lie, on
    the stream that is current in their library, and nothing here waits for the GPU, except where
    something is new: a kernel, which is compiled, a block mask, or for hopper the place of an array
    (its tensor maps are copied to the card, and stay there as long as they are used now and then: a
    CUDA graph that outlives a thousand other places of arrays must be captured again).

    Parameters
    ----------
    q, k, v : arrays (..., H_q, n_q, d), (..., H_kv, n_k, d) and (..., H_kv, n_k, d_v)
        float32 for naive, tiled and registers, float16 or bfloat16 for tensor_core and hopper; all
        of one dtype. On the GPU: whatever has DLPack or `__cuda_array_interface__` (PyTorch, CuPy,
        Numba, JAX). In main memory: what NumPy reads, copied over and back. 2-D (n, d) is one head;
        H_q is a multiple of H_kv. d and d_v are at most 128 (hopper: 256, naive: any). registers,
        tensor_core and hopper copy 16 bytes at a time: rows are contiguous, start at multiples of
        16 bytes and are one long. A width between 16, 32, … (registers: 32, 64, 128; hopper: 64,
        128, 256) costs as much as the next. hopper's strides are above 0: no `broadcast_to`.
    scale : float, optional
        Factor of the scores; 1/√d if None.
    causal : bool or "top-left"
        As in `flashref.flash_attention_2`: True lets the last query see the last key.
    return_lse : bool
        Whether to return lse too.
    kernel : {"auto", "naive", "tiled", "registers", "tensor_core", "hopper"}
        The rung; "auto" takes the fastest one for the arrays and the card. hopper is for compute
        capability 9.0; where card, widths or strides do not allow it and it was asked for,
        tensor_core runs, and a FallbackWarning says why.

    Returns
    -------
    o : array (..., H_q, n_q, d_v)
        Of the kind and dtype of q; a library other than NumPy, PyTorch and CuPy gets Numba device
        arrays. Rows that see no key are 0.
    lse : float32 array (..., H_q, n_q)
        With return_lse: log Σ exp of the row's scores, -inf where it sees no key.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.
    flashref.cuda.device.GpuError
        If this machine cannot run the kernel, saying what is missing.

    Notes
    -----
    In registers and tensor_core, a NaN or infinity in a row of v can reach a query that does not
    see it if another query of the same block does: there its weight is 0, and 0 times NaN is NaN.
    naive and tiled skip what is not seen. In hopper, if any query at all sees the row, it can reach
    every query whose block sees any row of the same tile of up to 128 keys.
    """
    from flashref.cuda import launch

    return launch.forward(q, k, v, scale, causal, return_lse, kernel)


def flash_attention_2_backward(
    do, q, k, v, o, lse, *, scale=None, causal=False, kernel="auto", deterministic=False
):
    """Return the gradients, computed on the GPU: P is recomputed from lse, as in Algorithm 2.

    tensor_core takes one pass over the keys, 5 products, in which its blocks add to dq in whatever
    order they come, or two passes and 7 products: see `deterministic`.

    Parameters
    ----------
    do : array (..., H_q, n_q, d_v)
        Gradient of the loss with respect to o, of the dtype of q.
    q, k, v : arrays
        As in `flash_attention_2`: float32 for tiled, float16 or bfloat16 for tensor_core; at most
        128 columns.
    o, lse : arrays
        What the forward pass returned.
    scale, causal
        As in the forward pass.
    kernel : {"auto", "tiled", "tensor_core"}
        The rung; "auto" takes the one for the dtype.
    deterministic : bool
        True: every sum has one order, and equal calls give equal bits. False: so have dk and dv,
        also over the heads that share a key head, but the last bits of dq may differ from call to
        call; that is faster, and takes 4 bytes more of the GPU's memory for each number of dq
        (rows of up to 64 columns count as 64, longer ones as 128). tiled is deterministic always.

    Returns
    -------
    dq, dk, dv : arrays of the shapes of q, k and v, of the kind and dtype of q

    Raises
    ------
    TypeError, ValueError, flashref.cuda.device.GpuError
        As `flash_attention_2`.

    Notes
    -----
    In tensor_core, P and dS are rounded to halves before the products that sum them up; in float16
    a dS beyond 65504 is infinite. What a NaN or infinity reaches is as in the forward pass: rows of
    its block of queries or keys, and nothing where nobody there sees it. In one pass, one in a row
    of k can also reach dq of each query in whose tile of up to 64 any query sees any key of the
    same block of up to 128.
    """
    from flashref.cuda import launch

    return launch.backward(do, q, k, v, o, lse, scale, causal, kernel, deterministic=deterministic)


def block_sparse_attention(
    q, k, v, block_mask, *, block_q, block_k, scale=None, causal=False, return_lse=False
):
    """Return attention in which query block i sees key block j only where block_mask[i, j].

    The rung tensor_core, walking over a list of the tiles that are there: the others are never
    loaded. As `flashref.block_sparse_attention`, with one mask for all heads. The lists are made
    when a mask comes for the first time.

    Parameters
    ----------
    q, k, v : float16 or bfloat16 arrays
        As in `flash_attention_2`.
    block_mask : bool array (T_r, T_c)
        In main memory. T_r = ⌈n_q / block_q⌉ by T_c = ⌈n_k / block_k⌉; True = the tile is there.
    block_q, block_k : int
        Rows and columns of a tile: multiples of 64, of which one may hold several tiles of the
        kernel; multiples of 128 are faster. They need not divide n_q and n_k.
    scale, causal, return_lse
        As in `flash_attention_2`.

    Returns
    -------
    o, lse : arrays
        As `flash_attention_2`; 0 and -inf for a query without tiles.

    Raises
    ------
    TypeError, ValueError, flashref.cuda.device.GpuError
        As `flash_attention_2`.
    """
    from flashref.cuda import launch

    mask = block_mask, block_q, block_k
    return launch.sparse_forward(q, k, v, *mask, scale, causal, return_lse)


def block_sparse_attention_backward(
    do, q, k, v, o, lse, block_mask, *, block_q, block_k, scale=None, causal=False,
    deterministic=False,
):  # fmt: skip
    """Return the gradients of block-sparse attention, without touching the absent tiles.

    Parameters
    ----------
    do : array (..., H_q, n_q, d_v)
        Gradient of the loss with respect to o, of the dtype of q.
    q, k, v, block_mask, block_q, block_k, scale, causal
        As in `block_sparse_attention`.
    o, lse : arrays
        What the forward pass returned.
    deterministic : bool
        As in `flash_attention_2_backward`.

    Returns
    -------
    dq, dk, dv : arrays of the shapes of q, k and v, of the kind and dtype of q
        0 for queries, keys and values without tiles.

    Raises
    ------
    TypeError, ValueError, flashref.cuda.device.GpuError
        As `flash_attention_2`.
    """
    from flashref.cuda import launch

    mask = block_mask, block_q, block_k
    return launch.sparse_backward(do, q, k, v, o, lse, *mask, scale, causal, deterministic)
