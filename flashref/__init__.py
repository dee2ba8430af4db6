"""FlashAttention in NumPy: to read, to run, to watch, and to check your own against.

Each algorithm is written once, reads like the paper's pseudocode, runs at speed, and counts its own
slow-memory traffic. Start with the notebooks, or with `help(flashref.flash_attention_2)`.
"""

import importlib

from flashref import io_model
from flashref.block_sparse import block_sparse_attention, block_sparse_attention_backward
from flashref.dropout import dropout_keep
from flashref.flash1 import flash_attention_1, flash_attention_1_backward
from flashref.flash2 import (
    flash_attention_2,
    flash_attention_2_backward,
    flash_attention_varlen,
)
from flashref.io_model import block_sizes
from flashref.memory import Memory
from flashref.scores import alibi_slopes
from flashref.softmax import (
    merge_attention,
    naive_softmax,
    online_softmax,
    online_softmax_steps,
    safe_softmax,
)
from flashref.standard import standard_attention, standard_attention_backward

__version__ = "0.1.0"

__all__ = [
    "Memory",
    "alibi_slopes",
    "block_sizes",
    "block_sparse_attention",
    "block_sparse_attention_backward",
    "dropout_keep",
    "flash_attention_1",
    "flash_attention_1_backward",
    "flash_attention_2",
    "flash_attention_2_backward",
    "flash_attention_varlen",
    "io_model",
    "merge_attention",
    "naive_softmax",
    "online_softmax",
    "online_softmax_steps",
    "safe_softmax",
    "standard_attention",
    "standard_attention_backward",
]

# they import more than NumPy, or much, or are asked for in one lesson only
_ON_DEMAND = ("check", "cuda", "data", "flash3", "plots", "widgets")


def __getattr__(name):
    if name in _ON_DEMAND:
        return importlib.import_module(f"flashref.{name}")
    raise AttributeError(f"module 'flashref' has no attribute {name!r}")
