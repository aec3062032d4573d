"""Cache accounting: which block of which family holds which tokens of whom. Counts blocks, never sees a tensor."""
