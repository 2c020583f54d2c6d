"""Shrink pretrained networks by Fisher-weighted SVD."""

import lazy_loader

from facts.version import __version__ as __version__

# PyTorch takes seconds to load, and the command line's help need not wait: each name is imported when it is asked for.
# `__init__.pyi` says from where.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
