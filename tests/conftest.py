"""Being here, this file puts `tests` on the import path, where the shared helpers lie."""
