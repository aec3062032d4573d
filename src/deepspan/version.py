"""The version, alone in its module so that `deepspan --version` imports nothing else."""

__version__ = "0.1.0"
