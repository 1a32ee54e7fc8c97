"""A run: what connects the stages from the prepared rows to the written files."""
