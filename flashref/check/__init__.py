"""Homework checks that say which mistake it was.

`check.attention(my_attention)` calls the function on cases from easy to nasty, compares with
flashref's own answers, and returns a `Report`: passed or not, the simplest case that goes wrong
with both answers, and the known mistake that gives the same wrong numbers.

A function is called by the names in its signature (`q` or `Q`, `block_q` or `Br`, `causal` or
`is_causal`, ...); an option that it does not have is not asked for. It may take and return lists,
NumPy arrays, PyTorch or JAX tensors, in float64 or float32.

A function of one row, or of one head, is right as such: where larger arrays raise an error in it,
the check passes, and says first what it is right for, then what was not checked and why
(`report.not_checked`).
"""

from flashref.check.report import Report
from flashref.check.running import run

__all__ = [
    "Report",
    "attention",
    "attention_backward",
    "block_sizes",
    "block_sparse_attention",
    "merge_attention",
    "online_softmax",
    "softmax",
    "traffic",
]


def softmax(fn, *, masked=False, cases=None, seed=0):
    """Check fn(x), the softmax of a vector, or of each row of a matrix.

    Scores of -inf, as masks make them, are tried in the end: the report speaks of them, but no
    function fails by them, unless `masked` asks for them.

    Parameters
    ----------
    fn : callable
        Takes x, and perhaps axis.
    masked : bool
        Whether the exercise speaks of scores of -inf: then they get the weight 0, and a row of
        nothing else gives zeros, or the function fails.
    cases : None or "small"
        "small" leaves out the cases with more than 64 rows, for a function that is very slow.
    seed : int
        Of the random cases.

    Returns
    -------
    report : Report

    Examples
    --------
    >>> import flashref
    >>> from flashref import check
    >>> check.softmax(flashref.safe_softmax).passed
    True
    """
    return run("softmax", fn, cases, seed, masked)


def online_softmax(fn, *, masked=False, cases=None, seed=0):
    """Check fn(x), the softmax of a vector that is read block by block.

    Parameters
    ----------
    fn : callable
        Takes x, and perhaps block and axis.
    masked, cases, seed
        As in `softmax`.

    Returns
    -------
    report : Report

    Examples
    --------
    >>> import flashref
    >>> from flashref import check
    >>> check.online_softmax(flashref.online_softmax).passed
    True
    """
    return run("online_softmax", fn, cases, seed, masked)


def merge_attention(fn, *, cases=None, seed=0):
    """Check fn(o_a, lse_a, o_b, lse_b), which joins two parts of attention into (o, lse).

    Parameters
    ----------
    fn : callable
        Takes o_a (n, d_v), lse_a (n,), o_b and lse_b.
    cases, seed
        As in `softmax`.

    Returns
    -------
    report : Report

    Examples
    --------
    >>> import flashref
    >>> from flashref import check
    >>> check.merge_attention(flashref.merge_attention).passed
    True
    """
    return run("merge_attention", fn, cases, seed)


def attention(fn, *, cases=None, seed=0):
    """Check fn(q, k, v), attention of any kind: naive or tiled, with the options that it has.

    Parameters
    ----------
    fn : callable
        Takes q (n_q, d), k (n_k, d), v (n_k, d_v), or with batch and heads in front, and perhaps
        causal, scale, block_q, block_k, block, window, mask, return_lse. Returns o or (o, lse).
    cases, seed
        As in `softmax`.

    Returns
    -------
    report : Report

    Examples
    --------
    >>> import flashref
    >>> from flashref import check
    >>> check.attention(flashref.flash_attention_2).passed
    True
    """
    return run("attention", fn, cases, seed)


def attention_backward(fn, *, cases=None, seed=0):
    """Check fn(do, q, k, v), the gradients (dq, dk, dv) of attention.

    Parameters
    ----------
    fn : callable
        Takes do, q, k, v, and perhaps o and lse of the forward pass, causal, scale, block_q,
        block_k; or a class with `forward`, `backward` and `apply`.
    cases, seed
        As in `softmax`.

    Returns
    -------
    report : Report

    Examples
    --------
    >>> import flashref
    >>> from flashref import check
    >>> check.attention_backward(flashref.standard_attention_backward).passed
    True
    """
    return run("attention_backward", fn, cases, seed)


def block_sparse_attention(fn, *, cases=None, seed=0):
    """Check fn(q, k, v, block_mask, block_q=..., block_k=...), attention over some of the tiles.

    Parameters
    ----------
    fn : callable
        Takes q, k, v, the boolean block_mask (⌈n_q/block_q⌉, ⌈n_k/block_k⌉), block_q and block_k,
        and perhaps causal, scale, return_lse. Returns o or (o, lse).
    cases, seed
        As in `softmax`.

    Returns
    -------
    report : Report

    Examples
    --------
    >>> import flashref
    >>> from flashref import check
    >>> check.block_sparse_attention(flashref.block_sparse_attention).passed
    True
    """
    return run("block_sparse_attention", fn, cases, seed)


def block_sizes(fn, *, cases=None, seed=0):
    """Check fn(sram_elements, d), the paper's block sizes (B_r, B_c).

    Parameters
    ----------
    fn : callable
        Takes sram_elements (or M) and d.
    cases, seed
        As in `softmax`.

    Returns
    -------
    report : Report

    Examples
    --------
    >>> import flashref
    >>> from flashref import check
    >>> check.block_sizes(flashref.block_sizes).passed
    True
    """
    return run("block_sizes", fn, cases, seed)


def traffic(fn, *, cases=None, seed=0):
    """Check the slow-memory traffic of a tiled algorithm, or a closed form of it, exactly.

    The counts of FlashAttention-1 and of FlashAttention-2 are both right; the report says which.
    The sums over all arrays count; the names under which they move are labels.

    A tiled algorithm is asked once more with a memory that loads other numbers than the arrays
    hold: its answer must follow the tiles. That shows a tile that is loaded and thrown away. It
    does not show for how long one is kept (loading K again and computing from the first copy), nor
    whether what is stored is what is returned.

    Parameters
    ----------
    fn : callable
        Takes q, k, v, block_q, block_k and memory, reads q, k, v through memory.load, writes
        through memory.store, and returns o or (o, lse); or takes n_q, n_k, d, d_v, block_q,
        block_k and returns (loads, stores) in elements.
    cases, seed
        As in `softmax`.

    Returns
    -------
    report : Report

    Examples
    --------
    >>> import flashref
    >>> from flashref import check
    >>> check.traffic(flashref.io_model.fa2_traffic).passed
    True
    """
    return run("traffic", fn, cases, seed)
