"""Prepared samples on disk, their identity, and token counts over them."""
