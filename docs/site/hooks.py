"""Hooks of mkdocs.yml: adds the files that pages link to, such as notebooks, and keeps other
servers out.
"""

import posixpath
import re
import runpy
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LOADED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?(?:https?:)?//[^"' >]+"""
)
_UPWARDS = re.compile(r"\]\((\.\./[^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the targets of all links that leave docs/."""
    for page in list(files.documentation_pages()):
        for link in _UPWARDS.findall(page.content_string):
            target = posixpath.normpath(
                posixpath.join("docs", posixpath.dirname(page.src_uri), link)
            )
            if not target.startswith("docs/") and files.get_file_from_path(_place(target)) is None:
                files.append(_added(config, target))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let these links lead to the added files; take the escapes that GitHub needs out of tables'
    code.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        return (
            link[0]
            if target.startswith("docs/")
            else f"]({posixpath.relpath(_place(target), folder)})"
        )

    return _UPWARDS.sub(moved, markdown).replace("\\|", "|")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Fail if the page would load anything from the network."""
    if found := _LOADED.findall(output):
        raise PluginError(f"{page.file.src_uri} loads {', '.join(found)}")
    return output


def _place(target: str) -> str:
    """Return a file's place in the site; Markdown outside docs/ is shown as text."""
    return "repository/" + re.sub(r"\.md$", ".md.txt", re.sub(r"\.ipynb$", ".html", target))


def _added(config: MkDocsConfig, target: str) -> File:
    if not target.endswith(".ipynb"):
        return File.generated(config, _place(target), abs_src_path=str(ROOT / target))
    as_page = runpy.run_path(str(ROOT / "examples/run_demo.py"))["as_page"]
    page = as_page(nbformat.read(ROOT / target, as_version=4), Path(target).stem)
    page = re.sub(r'href="\.\./docs/([\w/-]+)\.md', r'href="../../\1.html', page)
    return File.generated(
        config, _place(target), content=re.sub(r'href="([\w-]+)\.ipynb"', r'href="\1.html"', page)
    )
