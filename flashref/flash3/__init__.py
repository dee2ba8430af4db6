"""FlashAttention-3's ideas: a pipeline in simulated time, its algorithm, and FP8 rounding.

Shah et al. (2024), arXiv:2407.08608. `simulate` says when each task of a pipeline would run, and
`replay` carries such a `Schedule` out on real arrays; `pipelined_attention` is the paper's
Algorithm 2; `fp8_attention` rounds its inputs to eight bits.
"""

from flashref.flash3.algorithm import pipelined_attention, replay
from flashref.flash3.fp8 import (
    LARGEST,
    e4m3_values,
    fp8_attention,
    hadamard,
    outlier_inputs,
    quantise,
    rotation,
    round_e4m3,
)
from flashref.flash3.schedules import (
    KINDS,
    PER_BLOCK,
    UNITS,
    Held,
    Interval,
    Schedule,
    programs,
    schedule,
    simulate,
)

__all__ = [
    "KINDS",
    "LARGEST",
    "PER_BLOCK",
    "UNITS",
    "Held",
    "Interval",
    "Schedule",
    "e4m3_values",
    "fp8_attention",
    "hadamard",
    "outlier_inputs",
    "pipelined_attention",
    "programs",
    "quantise",
    "replay",
    "rotation",
    "round_e4m3",
    "schedule",
    "simulate",
]
