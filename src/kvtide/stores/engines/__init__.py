"""Engines behind one contract, by name."""
