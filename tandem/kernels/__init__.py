"""Operators whose results do not depend on what shares the batch (design decision D7), in torch."""
