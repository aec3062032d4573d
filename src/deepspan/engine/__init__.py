"""Turning user input into requests and model output into events; no torch."""
