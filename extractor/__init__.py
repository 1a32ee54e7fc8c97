"""extractor: a language model's hidden states on disk.

Nothing is imported here: SGLang loads this package's platform plugin at its own import, in every
program on the same Python, and that must cost nothing.
"""
