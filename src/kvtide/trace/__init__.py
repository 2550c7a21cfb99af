"""What was wanted of the cache and what the drive did for it, as events."""
