"""Rows of any container to ids and masks: read -> normalise -> render -> mask -> tokenize -> store.

Nothing is imported here: the worker processes load only the parts that they run, and none of those
imports torch.
"""
