"""Targets over the disk tiers of other projects, each driven through its own interface and its own keys."""
