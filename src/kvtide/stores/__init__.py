"""Vector stores side by side: what each writes to the device for a row, and reads from it for a query."""
