"""FlashAttention-3's ideas: one test file for each module, and what they share."""
