"""What the site adds to the files of docs/: pages from elsewhere in the repository.

Links are written as the code host follows them, from file to file. Here a link leads to the page that the file has on
the site; a file that is no page, such as a module, gets one that shows it.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/README.md": "tests.md",
    "patches/README.md": "patches.md",
}
"""Pages whose files stand outside docs/, where the code host expects them."""
SEARCH_WEIGHTS = {
    "troubleshooting": 2.3,
    "clusters": 1.5,
    "performance": 0.5,  # many numbers, which a question has too
    **dict.fromkeys(("architecture", "contributing", "patches", "tests", "zh-CN", "first-hour.zh-CN"), 0.2),
    **dict.fromkeys(("api/", "changelog"), 0.02),
}
"""Weights in the search of pages whose names begin so; other pages have 1, and those that show a file are left out."""
LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?!https?:|mailto:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside docs/, and one for every other file that a page links to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    linked = {target for file in files.documentation_pages() for target in targets(file)}
    for path in sorted(linked):
        if files.get_file_from_path(uri_of(path)) is None and (ROOT / path).is_file():
            files.append(File.generated(config, uri_of(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links that lead to pages of the site."""
    for name, weight in SEARCH_WEIGHTS.items():
        if page.file.src_uri.startswith(name):
            page.meta["search"] = {"boost": weight}
    here, titles = path_of(page.file.src_uri), dict(titled(config.nav))

    def moved(link: re.Match) -> str:
        target = uri_of(posixpath.normpath(posixpath.join(posixpath.dirname(here), link["path"])))
        text = titles.get(target, link["text"]) if link["text"].endswith(".md") else link["text"]
        uri = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({uri}{link['anchor'] or ''})"

    if not here.startswith("docs/source/"):
        markdown = LINK.sub(moved, markdown)
    return markdown


def titled(nav: list) -> Iterator[tuple[str, str]]:
    """The pages of the navigation with their titles."""
    for title, entry in (pair for item in nav for pair in item.items()):
        yield from titled(entry) if isinstance(entry, list) else [(entry, title)]


def path_of(uri: str) -> str:
    """Where the file of a page stands in the repository."""
    return next((path for path, page in PAGES.items() if page == uri), f"docs/{uri}")


def uri_of(path: str) -> str:
    """The page, or other file, that shows a file of the repository on the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def targets(file: File) -> Iterator[str]:
    """The files of the repository that a page links to."""
    here = posixpath.dirname(path_of(file.src_uri))
    return (posixpath.normpath(posixpath.join(here, link["path"])) for link in LINK.finditer(file.content_string))


def shown(path: str) -> str:
    """A page that shows a file, or the cells of a notebook."""
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n"
    text = (ROOT / path).read_text()
    if not path.endswith(".ipynb"):
        return head + fenced(text, {".py": "python", ".sh": "bash", ".md": "markdown"}.get(Path(path).suffix, "text"))
    cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"])
    return head + "\n\n".join(fenced(source, "python") if kind == "code" else source for kind, source in cells)


def fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"
