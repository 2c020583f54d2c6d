"""Shrink pretrained networks by Fisher-weighted SVD."""

import logging

import lazy_loader

from facts.utils.version import __version__ as __version__

# On import, PyTorch's timers warn about an installation of CUDA without a GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

# PyTorch takes seconds to load, and the command line's help need not wait for it: each name in `__init__.pyi` is
# imported on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
