"""The paper's tables and figures, and your own: commands, which end with a line if their packages are missing."""

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("hydra", "jinja2", "matplotlib", "omegaconf", "pandas", "sklearn")

if missing := [package for package in PACKAGES if find_spec(package) is None]:
    raise SystemExit(f"error: experiments need {', '.join(missing)}: pip install 'facts[experiments]'")

if sys.flags.optimize:  # which drops asserts, within some of which Hydra's parser reads on
    from hydra.core.override_parser import overrides_parser, overrides_visitor

    code = compile(Path(overrides_visitor.__file__).read_bytes(), overrides_visitor.__file__, "exec", optimize=0)
    exec(code, vars(overrides_visitor))
    overrides_parser.HydraOverrideVisitor = overrides_visitor.HydraOverrideVisitor  # type: ignore[misc]
