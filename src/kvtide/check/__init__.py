"""Checks of stores of KV, whoever made them: `kvtide check`."""
