"""Real input: Q, K and V of three layers of a trained transformer, and the words it was reading.

README.md beside this file tells where they come from, under which licence, and what is in them.
"""

import importlib.resources
import json

import numpy as np

from flashref.inputs import count, require

_FILES = importlib.resources.files(__name__)


def real_qkv(layer=0):
    """Return q, k and v of one layer of all-MiniLM-L6-v2 while it reads a paragraph.

    Attention over them has the default scale 1/sqrt(32) and no mask. They were rounded to float16
    to be stored, so a cast to float16 changes nothing.

    Parameters
    ----------
    layer : int
        0 has the outliers, and a head that looks at the previous token only; 1 has the attention
        sink; 5, the last of the six, is an ordinary one. No other layer is stored.

    Returns
    -------
    q, k, v : float32 arrays of shape (12, 139, 32)
        12 heads, 139 tokens, d = 32. They are new at each call and yours to write into.

    Raises
    ------
    ValueError
        If the layer is not stored; TypeError if it is no integer.

    Examples
    --------
    >>> q, k, v = real_qkv(layer=0)
    >>> q.shape, q.dtype
    ((12, 139, 32), dtype('float32'))
    >>> scores = q @ k.swapaxes(1, 2) / 32**0.5
    >>> print(f"from {scores.min():.1f} to {scores.max():.1f}; Gaussians give -5.0 to 4.6")
    from -66.8 to 77.1; Gaussians give -5.0 to 4.6
    """
    stored = _about()["layers"]
    layer = count("layer", layer, least=0, hint=f"; the stored layers are {stored}")
    require(layer in stored, f"{layer=} is not stored; the stored layers are {stored}")
    with (_FILES / "real_qkv.npy").open("rb") as file:
        qkv = np.load(file, allow_pickle=False)[stored.index(layer)]  # (3, heads, n, d)
    q, k, v = (x.astype(np.float32) for x in qkv)
    return q, k, v


def real_tokens():
    """Return the 139 tokens that the rows of `real_qkv` stand for.

    The tokenizer knows lower case alone. It cuts a rare word (what follows a cut starts with ##)
    and takes Chinese one character at a time, [UNK] for one that it does not know.

    Returns
    -------
    tokens : list of str
        From [CLS] to [SEP]; a new list at each call.

    Examples
    --------
    >>> tokens = real_tokens()
    >>> print(*tokens[:14])
    [CLS] a reader with a small desk cannot lay out the whole archive .
    >>> print(*tokens[88:101])
    sum is res ##cal ##ed . 山 中 有 大 [UNK] [UNK] ，
    """
    return _about()["tokens"].split(" ")


def _about():
    """Return the contents of real_qkv.json."""
    return json.loads((_FILES / "real_qkv.json").read_text(encoding="utf-8"))
