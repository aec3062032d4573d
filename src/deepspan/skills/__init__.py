"""Seeded exercises for small models: drawn pictures and short texts, each with questions and exact answers."""
