"""Layouts: the native file format, and those that SpecForge, speculators and Model-Optimizer read.

A layout defines which states a file holds and in which order, the names of its tensors, its path,
and its bytes. Writing, journal and resume are the same for all layouts.
"""

from extractor.layouts.base import Layout, Numbering
from extractor.layouts.modelopt import ModelOpt
from extractor.layouts.native import Native
from extractor.layouts.specforge import DFlash, DSpark, Eagle3
from extractor.layouts.speculators import Speculators

LAYOUTS: dict[str, type[Layout]] = {
    kind.name: kind for kind in (Native, Eagle3, DFlash, DSpark, Speculators, ModelOpt)
}
__all__ = ["LAYOUTS", "Layout", "Numbering"]
