"""The `deepspan` command."""
