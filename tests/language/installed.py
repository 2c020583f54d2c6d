"""Imported first by the tests here, which are skipped where the extra `llm` is missing."""

from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("accelerate", "datasets", "lm_eval", "tokenizers", "transformers"))):  # slow to import
    pytest.skip("the extra `llm` is not installed: make install-llm", allow_module_level=True)
