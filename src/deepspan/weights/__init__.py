"""Checkpoints: tensor tables, names, loading, tiny random checkpoints."""
