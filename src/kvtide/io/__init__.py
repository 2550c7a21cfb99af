"""Engines that move bytes: io_uring, threads, and a simulated drive, behind one contract."""
