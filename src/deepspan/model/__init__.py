"""The network, written once."""
