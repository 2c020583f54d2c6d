"""Hooks of MkDocs (`mkdocs.yml`): the files of the site, and the parts of pages that are written at each build.

The site has the tree of the repository. Hence a link between two files works in both, and the README is the home page.
"""

import re
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from public_names import public_names

ROOT = Path(__file__).parents[1]
SOURCES = (
    *("*.md", "CITATION.cff", "tests/README.md", "examples/*.*"),
    *("docs/*.md", "docs/*.svg", "docs/*.png", "docs/*.css", "docs/*.js"),
    *("results/*/*.md", "results/*/*/*.md", "results/*/*.png", "results/*/figures/*.png", "results/*/report.html"),
)
FRAME = '<iframe src="report.html" title="Report"></iframe>'


@event_priority(100)  # before plugins that look for files of theirs
def on_files(files, config):
    """The theme's files, and those of the repository in their places."""
    paths = sorted(path.relative_to(ROOT) for pattern in SOURCES for path in ROOT.glob(pattern))
    own = [File(str(path), str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    taken = {file.dest_uri for file in own if not file.is_documentation_page()}
    for page in own:
        if page.is_documentation_page() and page.dest_uri in taken:  # report.md beside report.html
            page.dest_uri = f"{page.src_uri}.html"
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *own])


def on_page_markdown(markdown, page, **_):
    """The page with its parts that are written at each build."""
    write = PARTS.get(page.file.src_uri)
    return write(markdown) if write else markdown


def with_names(page: str) -> str:
    """The public names of each package, whose signatures and docstrings mkdocstrings puts in."""
    names = dict(public_names())

    def directives(mark: re.Match) -> str:
        return "\n\n".join(f"::: {mark[1]}.{name}" for name in names[mark[1]])

    return re.sub("<!-- names: (.+) -->", directives, page)


def with_report(page: str) -> str:
    """The whole report, in a frame below the link to it."""
    return re.sub(r"(^.*\(report\.html\)$)", rf"\1\n\n{FRAME}", page, flags=re.MULTILINE)


PARTS = {"docs/api.md": with_names} | {f"results/{name}/report.md": with_report for name in ("mini", "photos")}
