"""The output folder as everybody reads it: run.json, journals, what is done, and the lock."""
