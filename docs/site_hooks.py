"""Hooks of mkdocs: create pages for linked source files, and remove the test marks of code blocks."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?)\)")


def _source_page(page: str, link: str) -> str | None:
    """Address under docs/ of the page generated for a linked source; None: the link stays inside docs/.

    page: the linking page, relative to docs/.
    """
    target = (DOCS / page).parent.joinpath(link).resolve()
    if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT):
        return None
    name = str(target.relative_to(ROOT))
    return f"source/{name}" if name.endswith(".md") else f"source/{name}.md"


def _source_text(target: Path) -> str:
    """Text of the generated page: a page unchanged, another file as one block, a folder as a list of its files."""
    name = target.relative_to(ROOT)
    if target.is_dir():
        return "\n".join([f"# {name}/", "", *(f"- `{each.name}`" for each in sorted(target.glob("*.py")))])
    if target.suffix == ".md":
        return target.read_text()
    kind = {".py": "python", ".toml": "toml"}.get(target.suffix, "text")
    return f"# {name}\n\n````{kind}\n{target.read_text()}\n````\n"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every file outside docs/ that a page links to."""
    for file in list(files.documentation_pages()):
        for link, _ in _LINK.findall(Path(file.abs_src_path).read_text()):
            address = _source_page(file.src_uri, link)
            if address and files.get_file_from_path(address) is None:
                text = _source_text((DOCS / file.src_uri).parent.joinpath(link).resolve())
                # Reached only by links.
                files.append(File.generated(config, address, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at the pages of sources, and drop the words after the language of a block."""

    def mend(found: re.Match[str]) -> str:
        address = _source_page(page.file.src_uri, found[1])
        if address is None:
            return found[0]
        return f"]({os.path.relpath(address, os.path.dirname(page.file.src_uri))}{found[2]})"

    return re.sub(r"^```python no-run .*$", "```python", _LINK.sub(mend, markdown), flags=re.MULTILINE)
