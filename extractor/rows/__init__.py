"""Turns rows of any container into ids and masks.

The stages are read -> normalise -> render -> mask -> tokenize -> store. This file imports nothing,
so that a worker process loads only the modules that it runs; none of those imports torch.
"""
