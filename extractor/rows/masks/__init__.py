"""From a conversation to ids and a mask: render, trace what the template wrote, encode.

Nothing is imported here: see extractor/rows/__init__.py.
"""
