"""Where KV is kept: memory, files; one contract."""
