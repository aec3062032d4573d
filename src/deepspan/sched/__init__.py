"""Scheduling: which tokens of which requests the next step computes. Plain integers; never sees a tensor."""
