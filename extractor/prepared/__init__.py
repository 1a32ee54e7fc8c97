"""Prepared samples on disk, and what is counted over them."""
