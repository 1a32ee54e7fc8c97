"""A run, put together from the stages."""
