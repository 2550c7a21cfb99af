"""Predicting time, traffic and hits from geometry, figures of hardware, and the production cache under virtual time."""
