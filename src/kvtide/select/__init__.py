"""What one decode step reads: selectors, one a file, behind one contract. Pure. Next: contract."""
