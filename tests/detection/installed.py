"""Imported first by the tests here, which are skipped where the extra `detection` is missing."""

import pytest

for module in ("mmcv._ext", "mmdet", "mmseg"):
    pytest.importorskip(module, reason="the extra `detection` is not installed: make install-detection")
