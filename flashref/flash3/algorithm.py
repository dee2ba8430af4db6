"""The arithmetic of a pipeline: a schedule carried out on real arrays, and Algorithm 2.

FlashAttention-3, §3.2. Unlike in FlashAttention-2, the products of two blocks of keys are under way
at once: S of the next block is there before P V of this one.
"""

import numpy as np

from flashref import heads, io_model
from flashref.flash3.schedules import Schedule
from flashref.heads import Options, Tiling
from flashref.inputs import float_array, require
from flashref.softmax import empty_state, exp_minus, finite, length, log_sum, nonzero, row_sum


def replay(schedule, q, k, v):
    """Return the attention that a schedule computes when it is carried out on real arrays.

    Loads write into a ring of buffers, products read from it. Half of a block's rows arrive when
    its load starts, the others when it ends, and a product reads at its end: a schedule that hands
    back a buffer too early gives finite, wrong numbers.

    Parameters
    ----------
    schedule : Schedule
    q : float array (n_q, d)
        Cut into as many tiles as the schedule has consumers.
    k, v : float arrays (n_k, d) and (n_k, d_v)
        Cut into the schedule's blocks.

    Returns
    -------
    o : float64 array (n_q, d_v)

    Raises
    ------
    TypeError, ValueError
        If the arrays do not fit together or have too few rows, or the schedule only loads.

    Examples
    --------
    >>> from flashref import standard_attention
    >>> from flashref.flash3 import schedule
    >>> x = np.arange(12.0).reshape(6, 2) / 12
    >>> right, wrong = (schedule("in sequence", 3), schedule("two-stage", 3, release="QK"))
    >>> [np.allclose(replay(s, x, x, x), standard_attention(x, x, x)) for s in (right, wrong)]
    [True, False]
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"{schedule=} must be a Schedule, as `schedule` and `simulate` return")
    q, k, v = one_head(q, k, v)
    used = {task.who for task in schedule.intervals if task.what == "QK"}
    workers = [who for who in schedule.workers if who in used]
    require(workers, "this schedule only loads; give one with a QK, a softmax and a PV")
    blocks = sorted({task.block for task in schedule.intervals})
    for name, x, parts in (("q", q, len(workers)), ("k", k, len(blocks))):
        require(len(x) >= parts, f"{name} has {len(x)} rows; this schedule needs {parts} at least")
    rows = dict(zip(workers, np.array_split(np.arange(len(q)), len(workers)), strict=True))
    cols = dict(zip(blocks, np.array_split(np.arange(len(k)), len(blocks)), strict=True))
    return _carry_out(schedule, q, k, v, rows, cols)


@np.errstate(all="ignore")  # keys may be infinite, and what a wrong schedule reads, anything
def _carry_out(schedule, q, k, v, rows, cols):
    """Return o; `rows` are the queries of each worker, `cols` the keys of each block."""
    places = {held.block: held.buffer for held in schedule.held}
    first = next(iter(cols.values()))  # no block is longer
    ring = {n: (np.zeros_like(k[first]), np.zeros_like(v[first])) for n in places.values()}

    def operand(which, j):
        whole = (k, v)[which]
        return ring[places[j]][which][: len(cols[j])] if places else whole[cols[j]]

    o, scale, on_chip = np.zeros((len(q), v.shape[1])), q.shape[1] ** -0.5, {}
    state = {who: empty_state(len(rows[who]), np.float64) for who in rows}
    events = sorted(
        (time, rank, at)
        for rank, task in enumerate(schedule.intervals)
        for at, time in (("start", task.start), ("end", task.end))
    )
    for _, rank, at in events:
        who, what, j, *_ = schedule.intervals[rank]
        if what == "load":
            half = len(cols[j]) // 2
            part = slice(0, half) if at == "start" else slice(half, None)
            operand(0, j)[part], operand(1, j)[part] = k[cols[j]][part], v[cols[j]][part]
        elif at == "start":
            continue
        elif what == "QK":
            on_chip[who, j] = scale * q[rows[who]] @ operand(0, j).T
        elif what == "softmax":
            state[who], *on_chip[who, j] = _softmax(*state[who], on_chip[who, j])
        else:
            correction, P = on_chip.pop((who, j))
            o[rows[who]] = correction[:, None] * o[rows[who]] + P @ operand(1, j)
    for who in rows:
        o[rows[who]] /= nonzero(state[who][1])[:, None]
    return o


def one_head(q, k, v):
    """Return the arrays of one head in float64; refuse other axes and what does not fit."""
    arrays = {name: float_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, x in arrays.items():
        require(x.ndim == 2, f"{name} has shape {x.shape}; give one head, (n, d)")
    heads.check_heads(*arrays.values())
    return [x.astype(np.float64) for x in arrays.values()]


def pipelined_attention(
    q, k, v, *, block_q=None, block_k=None, return_lse=False, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return exact attention with S of the next block before P V of this one (Algorithm 2).

    Moves what `flash_attention_2` moves; one more tile is on chip, P beside the next S.

    Parameters
    ----------
    q, k, v : arrays
        As in `standard_attention`.
    block_q, block_k : int, optional
        Rows B_r and columns B_c of a tile; they need not divide n_q and n_k.
    return_lse : bool
        Whether to return lse too.
    scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
        As in `standard_attention`.

    Returns
    -------
    o : array (..., H_q, n_q, d_v)
    lse : array (..., H_q, n_q)
        With return_lse.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.

    Notes
    -----
    What must be in range is as in `flash_attention_2`.

    Examples
    --------
    >>> q, k, v = [[1.0]], [[0.0], [1.0], [2.0]], [[1.0], [2.0], [4.0]]
    >>> print(pipelined_attention(q, k, v, block_q=1, block_k=1).round(6))
    [[3.240451]]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    tiling = Tiling(_pipelined_tiles, block_q, block_k, rows_in_parallel=True)
    return heads.forward(_pipelined, q, k, v, options, tiling, return_lse)


def _pipelined_tiles(rows, cols, d, d_v):
    """Return the elements of each array on chip: `forward_tiles`, and P beside the next S."""
    return io_model.forward_tiles(rows, cols, d, d_v) | {"P": rows * cols}


def _pipelined(Q, K, V, O, L, scores, hbm):
    """Algorithm 2 of FlashAttention-3 for one head; line 7's loop runs to the last block."""
    for rows in scores.row_blocks:
        seen = [cols for cols in scores.col_blocks if not scores.empty(rows, cols)]
        m_i, l_i = empty_state(length(rows), Q.dtype)  # line 2
        O_i = np.zeros((length(rows), V.shape[1]), Q.dtype)
        Q_i = hbm.load("Q", Q, rows)  # line 3
        # V and P of the block before: there is none yet, but the room for them is taken
        tile_cur, V_j, P_cur = None, *_room(V, rows, seen)
        for j, cols in enumerate(seen):  # lines 3 to 6 for j = 0, then 7 to 17
            K_j = hbm.load("K", K, cols)  # line 8
            tile = scores.tile(rows, cols)
            S_next = tile.scores(Q_i, K_j)  # line 9
            if j > 0:
                V_j = hbm.load("V", V, seen[j - 1])  # line 10
                O_i += tile_cur.product(P_cur, V_j)  # line 11
            hbm.on_chip(rows, cols, Q=Q_i, K=K_j, V=V_j, O=O_i, S=S_next, P=P_cur, m=m_i, l=l_i)
            (m_i, l_i), correction, P_next = _softmax(m_i, l_i, S_next)  # line 13
            O_i *= correction[:, None]  # line 14
            tile_cur, P_cur = tile, tile.drop(P_next).copy()  # line 16: the next S takes its room
        if seen:
            V_j = hbm.load("V", V, seen[-1])  # line 18
            O_i += tile_cur.product(P_cur, V_j)  # line 19
        hbm.store("O", O, rows, O_i / nonzero(l_i)[:, None])  # line 20
        hbm.store("L", L, rows, m_i + log_sum(l_i))


def _room(V, rows, seen):
    """Return zeros for one block of V and one tile of P."""
    cols = length(seen[0]) if seen else 0
    return np.zeros((cols, V.shape[1]), V.dtype), np.zeros((length(rows), cols), V.dtype)


def _softmax(m, l, S):
    """Take a tile of scores into (m, l); return the state, the factor on O, and P, over S."""
    m_new = np.maximum(m, S.max(axis=1))
    P = exp_minus(S, m_new)
    correction = np.exp(m - finite(m_new))
    return (m_new, correction * l + row_sum(P)), correction, P
