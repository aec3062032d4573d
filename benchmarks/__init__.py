"""Measurements: run by hand, written as JSON with facts about the machine; never part of the tests."""
