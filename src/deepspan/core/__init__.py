"""Records that travel between the parts of the engine; no torch, no behaviour beyond validation."""
