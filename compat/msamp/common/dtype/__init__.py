"""MS-AMP's names of number formats."""

from .dtypes import Dtypes, QType
from .floating import Floating

__all__ = ["Dtypes", "Floating", "QType"]
