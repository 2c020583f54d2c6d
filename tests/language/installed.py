"""Imported first by the tests here, which are skipped where the extra `llm` is missing."""

import pytest

for module in ("accelerate", "datasets", "lm_eval", "tokenizers", "transformers"):
    pytest.importorskip(module, reason="the extra `llm` is not installed: make install-llm")
