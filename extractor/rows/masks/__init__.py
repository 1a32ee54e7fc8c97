"""Turns a conversation into ids and a mask: render it, trace each character, encode the text.

This file imports nothing, for the reason given in extractor/rows/__init__.py.
"""
