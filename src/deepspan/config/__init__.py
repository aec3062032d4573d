"""Strict configuration, resolved once into frozen objects."""
