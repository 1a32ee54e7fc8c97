"""File formats: our own, and those that SpecForge, speculators and Model-Optimizer train from.

A layout says which states a file holds and in what order, what its tensors are called, where it
lies, and how its bytes are made. Writing, journal and resume are the same for all of them.
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
