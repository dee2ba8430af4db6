"""The catalogue: what learners get wrong, as functions, and what a learner is told about it.

A mistake may have several forms: one idea, with answers that differ where they are not numbers (a
guard against 0/0 or none, a division or a logarithm). `matching.py` compares them with an answer.
"""

from dataclasses import dataclass, field

import numpy as np

from flashref.check.faulty import (
    Attention,
    Backward,
    BlockSizes,
    ColumnAttention,
    Merge,
    OnlineSoftmax,
    Softmax,
    Traffic,
)

LESSONS = {
    "01": "01_standard_attention",
    "02": "02_safe_softmax",
    "03": "03_online_softmax",
    "04": "04_flash1_forward",
    "05": "05_io_complexity",
    "06": "06_standard_backward",
    "07": "07_flash1_backward",
    "08": "08_flash2",
    "09": "09_masks_and_heads",
    "10": "10_block_sparse",
}


@dataclass(frozen=True)
class Mistake:
    """Something that goes wrong often, as code and in words."""

    id: str
    sentence: str  #: what the learner reads first
    hint: str  #: a question or an experiment; never the line of code
    lesson: str  #: where to read again: number of the lesson
    where: str  #: what to look for in that lesson
    forms: dict = field(repr=False)  #: check -> functions (case, given) -> answer

    @property
    def checks(self):
        """The checks in which it can be named."""
        return tuple(self.forms)

    @property
    def read_again(self):
        """The place in the lessons, in words."""
        return f"lesson {self.lesson} (notebooks/{LESSONS[self.lesson]}.ipynb), {self.where}"


def _forward(*forms):
    """Return attention's forms; a block-sparse attention can go wrong in the same ways."""
    return {"attention": forms, "block_sparse_attention": forms}


FILLS = (-1e4, -1e5, -1e6, -1e9, -1e10, -1e30, *(float(np.finfo(t).min) for t in ("f4", "f8")))
FINITE = [
    Attention(fill=fill, fill_added=added, skip=skip)
    for fill in FILLS
    for added in (False, True)
    for skip in (False, True)
]
NO_STEP_GUARD = [
    Attention(step_guard=False, skip=skip, guard=guard)
    for guard in ("seen", "no", "l")
    for skip in (False, True)
]
EMPTY = [
    Attention(guard="no"), Attention(guard="nan"),
    Attention(guard="visited", skip=True),
]  # fmt: skip


def _online(**switches):
    return [OnlineSoftmax(**switches, guard=guard) for guard in (False, True)]


CATALOGUE = (
    Mistake(
        "no_max_subtraction",
        "Large scores overflow exp and very negative ones vanish; subtract the row's maximum "
        "first.",
        "What is exp(1000) on your machine, and what is exp(-1000)? Which number can you take away "
        "from every score of a row without changing its softmax?",
        "02", "the experiment that slides a constant over the scores",
        {
            "softmax": [Softmax(maximum="none"), Softmax(maximum="none", by_log=True)],
            "online_softmax": [
                OnlineSoftmax(start=0.0, maximum="none"),
                OnlineSoftmax(start=0.0, maximum="none", guard=False),
            ],
            **_forward(
                Attention(maximum="none"), Attention(maximum="none", guard="l"),
                Attention(maximum="none", by_log=True),
            ),
        },
    ),
    Mistake(
        "softmax_wrong_axis",
        "Your columns sum to 1; it is each query's row that must.",
        "Print the sums of your weights along both axes for a matrix with two rows.",
        "01", "the rows of P",
        {
            "softmax": [Softmax(over="column"), Softmax(over="first")],
            "online_softmax": [Softmax(over="column"), Softmax(over="first")],
            "attention": [ColumnAttention(), ColumnAttention(axis=0)],
        },
    ),
    Mistake(
        "no_final_division",
        "Your weights do not sum to 1: what happened to the normaliser l at the end?",
        "Put all values of V to 1. What must come out in every row, and what does?",
        "03", "the columns o and Õ of the worked table",
        {
            "softmax": [Softmax(divide=False)],
            "online_softmax": [OnlineSoftmax(divide=False)],
            **_forward(Attention(divide=False)),
        },
    ),
    Mistake(
        "max_starts_at_zero",
        "Right until all scores are very negative. What is the maximum of nothing?",
        "Run your code by hand on the scores -1000 and -1001. What is m after the first block?",
        "03", "the experiment with scores around -200",
        {
            "online_softmax": _online(start=0.0),
            **_forward(Attention(start=0.0), Attention(start=0.0, guard="l")),
        },
    ),
    Mistake(
        "no_rescale_l",
        "When a new maximum appears, the old sum l is still measured against the old one.",
        "Take the scores 1, 2 and then 3, 10 in two blocks. Against which maximum was l measured "
        "after the first block, and against which after the second?",
        "03", "the factor on the old part",
        {
            "online_softmax": _online(rescale="no"),
            **_forward(Attention(rescale_l="no")),
        },
    ),
    Mistake(
        "no_rescale_o",
        "The output gathered so far must shrink by the same factor as l when the maximum grows.",
        "After the first block the output was a sum of exp(s - m) v with the old m. What has to "
        "happen to that sum when m changes?",
        "03", "the factor on the old part",
        _forward(Attention(rescale_o="no")),
    ),
    Mistake(
        "no_rescale_both",
        "Neither l nor the output is corrected when the running maximum changes.",
        "Swap the two blocks of keys. Why does your answer change, and when does it not?",
        "03", "the factor on the old part",
        _forward(Attention(rescale_l="no", rescale_o="no")),
    ),
    Mistake(
        "max_not_carried",
        "Each block is measured against its own maximum; sums of different scales cannot be added.",
        "exp(1 - 2) + exp(10 - 10): which common factor would turn this into a sum of exp(s)?",
        "03", "m_block and m in the worked table",
        {
            "online_softmax": _online(maximum="own"),
            **_forward(Attention(maximum="own")),
        },
    ),
    Mistake(
        "rescale_inverted",
        "The correction factor is upside down: old contributions must shrink, not grow.",
        "The maximum rises from 2 to 10. Is your factor larger or smaller than 1?",
        "08", "the factor printed upside down in the paper (line 10)",
        {
            "online_softmax": _online(rescale="inverted"),
            **_forward(Attention(rescale_l="inverted", rescale_o="inverted")),
        },
    ),
    Mistake(
        "block_softmax_summed",
        "You normalise every block by itself and add the results; only one normalisation per row, "
        "over all keys.",
        "Put all values of V to 1 and use two blocks of keys. What comes out?",
        "03", "merging two parts",
        _forward(Attention(summed=True)),
    ),
    Mistake(
        "tail_keys_dropped",
        "The last, shorter block of keys is never visited.",
        "How many blocks does your loop visit for 5 keys in blocks of 2?",
        "04", "the experiment with B_c = 3",
        {
            "online_softmax": [*_online(tail="zero"), *_online(tail="unseen")],
            **_forward(Attention(tail_keys="dropped")),
        },
    ),
    Mistake(
        "tail_keys_zero_padded",
        "Padding keys take part in the softmax; they must score -inf.",
        "A padding key of zeros has the score 0. What is its weight, exp(0 - m), next to the real "
        "ones?",
        "04", "the experiment with a padded tail",
        _forward(Attention(tail_keys="zeros")),
    ),
    Mistake(
        "tail_queries_dropped",
        "The last, shorter block of queries is never computed.",
        "How many blocks does your loop visit for 5 queries in blocks of 2?",
        "04", "T_r and T_c, rounded up",
        _forward(Attention(tail_queries="dropped")),
    ),
    Mistake(
        "scale_missing",
        "Your scores are √d times too large: the scale is missing.",
        "Compute one score by hand, q_0 · k_0 with its factor, and compare it with yours.",
        "01", "the scale 1/√d",
        _forward(Attention(scale="missing"), Attention(scale="missing by default")),
    ),
    Mistake(
        "scale_one_over_d",
        "The scale is 1/√d, not 1/d.",
        "Compute one score by hand, q_0 · k_0 with its factor, and compare it with yours.",
        "01", "the scale 1/√d",
        _forward(Attention(scale="1/d")),
    ),
    Mistake(
        "head_zero_for_all",
        "Every head attends to the keys of head 0.",
        "Change the keys of head 1 only. Which rows of your output should move?",
        "09", "heads",
        _forward(Attention(heads="first")),
    ),
    Mistake(
        "gqa_heads_tiled",
        "Neighbouring query heads share a key head: 0,0,1,1, not 0,1,0,1.",
        "Write down, for 4 query heads and 2 key heads, which key head each one reads.",
        "09", "grouped heads (`repeat`, not `tile`)",
        _forward(Attention(heads="tiled")),
    ),
    Mistake(
        "causal_ignored",
        "Your queries still see the future.",
        "Change the last key. Which rows of a causal output may move?",
        "09", "which keys a query may see",
        _forward(Attention(sees="ignored")),
    ),
    Mistake(
        "causal_strict",
        "A query may see its own position too.",
        "What is the first row of a causal output? Which key does query 0 see?",
        "09", "which keys a query may see",
        _forward(Attention(sees="strict")),
    ),
    Mistake(
        "causal_off_by_one",
        "Each query sees one key too many.",
        "Which keys does query 0 see in your code? Print the mask for n = 3.",
        "09", "which keys a query may see",
        _forward(Attention(sees="one more")),
    ),
    Mistake(
        "causal_top_left",
        "With fewer queries than keys the *last* query lines up with the last key.",
        "One new query, eight cached keys: which of them may it see?",
        "09", "alignment for n_q ≠ n_k",
        _forward(Attention(sees="top-left")),
    ),
    Mistake(
        "causal_future",
        "The mask is turned round: your queries see only the future.",
        "Print your mask for n = 3. Which triangle is it?",
        "09", "which keys a query may see",
        _forward(Attention(sees="future")),
    ),
    Mistake(
        "diagonal_block_unmasked",
        "Blocks on the diagonal need the mask inside them.",
        "Draw a 4 × 4 causal mask in tiles of 2 × 2. Which tiles are neither full nor empty?",
        "09", "full, partial and empty tiles",
        _forward(
            Attention(whole_diagonal=True), Attention(whole_diagonal=True, skip=True),
        ),
    ),
    Mistake(
        "mask_fill_zero",
        "A masked score of 0 still has weight exp(0).",
        "Which score has a weight of exactly 0?",
        "10", "0 in place of -inf (erratum 26)",
        {"attention": [Attention(fill=0.0)]},
    ),
    Mistake(
        "empty_row_nan",
        "A query that sees no key must give 0, not 0/0.",
        "Which of your queries sees no key at all here? What are its m and l at the end?",
        "09", "a row with no key",
        {
            "attention": EMPTY,
            "block_sparse_attention": EMPTY,
            "attention_backward": [Backward(guard=False), Backward(guard=False, skip=True)],
        },
    ),
    Mistake(
        "no_inf_guard",
        "-inf - (-inf) is NaN: a row may meet a fully masked block before its first key.",
        "Follow m for a row whose first block is all -inf. What is m - m_new there?",
        "04", "a first tile that is all -inf",
        {"attention": NO_STEP_GUARD, "block_sparse_attention": NO_STEP_GUARD},
    ),
    Mistake(
        "finite_mask_value",
        "A masked score must be -inf: any finite stand-in loses to a row that is lower still, or "
        "turns an empty row into an average.",
        "What do your masked scores hold? Find a row of real scores that lies below it, or a row "
        "in which everything is masked.",
        "09", "the experiment with -1e4",
        {"attention": FINITE, "block_sparse_attention": FINITE},
    ),
    Mistake(
        "window_one_too_wide",
        "The window is one key too wide on the left: `left` does not count the query's own "
        "position.",
        "window=(0, 0) means the own position only. What does yours see then?",
        "09", "windows",
        _forward(Attention(sees="one more left")),
    ),
    Mistake(
        "lse_without_max",
        "The saved log-sum-exp must contain the maximum you subtracted.",
        "log Σ exp(s): write it with m and l = Σ exp(s - m).",
        "03", "the column L of the worked table",
        _forward(Attention(lse="no maximum")),
    ),
    Mistake(
        "lse_base2",
        "Your log-sum-exp is in base 2; it must be a natural logarithm.",
        "What is the lse of two equal scores 0? Is it log 2 or 1 in your code?",
        "03", "the base-2 experiment",
        _forward(Attention(lse="base 2")),
    ),
    Mistake(
        "merge_average",
        "The two parts do not weigh the same; weigh them by their exp(lse).",
        "One part has seen one key, the other a thousand. Which should count for more?",
        "03", "merging two parts",
        {"merge_attention": [Merge(average=True)]},
    ),
    Mistake(
        "merge_lse_added",
        "Add the sums, not their logarithms.",
        "lse is log Σ exp. What is the Σ exp of both parts together?",
        "03", "merging two parts",
        {"merge_attention": [Merge(lse_added=True)]},
    ),
    Mistake(
        "merge_base2",
        "Your merge works in base 2; lse is natural.",
        "Which number to the power of lse is the sum that lse stands for?",
        "03", "the base-2 experiment",
        {"merge_attention": [Merge(base=2.0)]},
    ),
    Mistake(
        "merge_empty_nan",
        "Two empty parts give an empty part, not NaN.",
        "Both lse are -inf. What is lse_a - max(lse_a, lse_b)?",
        "03", "exp(L_a - L) of two empty states",
        {
            "merge_attention": [
                Merge(guard=False, guard_lse=False), Merge(guard=False),
                Merge(guard=False, maximum=False),
                Merge(guard=False, maximum=False, guard_lse=False),
            ]
        },
    ),
    Mistake(
        "no_d_term",
        "Softmax couples the keys of a row: subtract D = rowsum(dO ∘ O).",
        "Add up one row of your dS. Softmax does not notice a constant added to a row of S; what "
        "does that say about the sum?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(d_term=False)]},
    ),
    Mistake(
        "p_unnormalised",
        "Recompute P with lse, so that its rows sum to 1.",
        "Add up one row of the P in your backward pass.",
        "07", "P = exp(S - L)",
        {"attention_backward": [
            Backward(normalised=False), Backward(normalised=False, d_from_p=True),
        ]},
    ),
    Mistake(
        "dq_unscaled",
        "dQ misses the scale.",
        "S = τ Q Kᵀ. Where does τ appear when S is differentiated by Q?",
        "06", "the experiment without τ",
        {"attention_backward": [Backward(scale_dq=False)]},
    ),
    Mistake(
        "dk_unscaled",
        "dK misses the scale.",
        "S = τ Q Kᵀ. Where does τ appear when S is differentiated by K?",
        "06", "the experiment without τ",
        {"attention_backward": [Backward(scale_dk=False)]},
    ),
    Mistake(
        "dq_overwritten",
        "dQ collects a share from every key block; yours keeps only the last.",
        "How often does your loop write to the same rows of dQ? What happens to what was there?",
        "07", "what stays and what passes by in the backward loop",
        {"attention_backward": [Backward(dq_last="last"), Backward(dq_last="visited")]},
    ),
    Mistake(
        "backward_causal_ignored",
        "Your backward pass lets masked keys take part.",
        "Which entries of P are 0 in the forward pass? Print the same P in your backward pass.",
        "09", "which keys a query may see",
        {"attention_backward": [
            Backward(sees="in lse"), Backward(sees="in lse", guard=False),
            Backward(sees="ignored"),
        ]},
    ),
    Mistake(
        "gqa_gradients_not_summed",
        "Several query heads share this key head; their gradients add up.",
        "Two query heads read one key. Move that key: through how many paths does the loss change?",
        "09", "grouped heads: dK, dV",
        {"attention_backward": [Backward(last_of_group=True)]},
    ),
    Mistake(
        "sparse_mask_ignored",
        "The block mask has no effect.",
        "Turn a block off. Does your output change at all?",
        "10", "Algorithm 5, line 8",
        {"block_sparse_attention": [Attention(sparse="ignored")]},
    ),
    Mistake(
        "sparse_score_zero",
        "Skipped blocks must have weight 0, that is score -inf.",
        "What is exp(0), and what is exp(-inf)?",
        "10", "0 in place of -inf (erratum 26)",
        {"block_sparse_attention": [Attention(sparse="zero")]},
    ),
    Mistake(
        "block_sizes_swapped",
        "Rows and columns are swapped: only B_r is capped by d.",
        "Q and O are cut in rows, K and V in columns of S. Which of the two sizes has min(…, d)?",
        "05", "the table of block sizes",
        {"block_sizes": [BlockSizes(swapped=True)]},
    ),
    Mistake(
        "block_sizes_floor",
        "The paper rounds M/4d up.",
        "M = 50, d = 4: M/4d is 3.125. Which whole number does the paper take?",
        "05", "the table of block sizes",
        {"block_sizes": [BlockSizes(floor=True)]},
    ),
    Mistake(
        "traffic_keys_once",
        "In FlashAttention-2 every query block reads all of K and V again.",
        "Which loop is the outer one? How many times does a row of K pass by?",
        "08", "which loads and stores moved out of the inner loop",
        {"traffic": [Traffic(keys_once=True)]},
    ),
    Mistake(
        "traffic_blocks_floored",
        "The last, shorter block of queries reads the keys too: round up.",
        "How many query blocks are there for 5 queries in blocks of 2?",
        "04", "T_r and T_c, rounded up",
        {"traffic": [Traffic(floor=True)]},
    ),
    Mistake(
        "traffic_query_reloaded",
        "Q_i can stay in fast memory during its whole row of tiles.",
        "Which of your loads stand in the inner loop, and which of them depend on j?",
        "08", "which loads and stores moved out of the inner loop",
        {"traffic": [Traffic(query_reloaded=True)]},
    ),
)  # fmt: skip

BY_ID = {mistake.id: mistake for mistake in CATALOGUE}
