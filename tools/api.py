"""List API changes since an earlier commit that break callers: removed or changed names, arguments and defaults.

Each breach has its class from docs/reference/stability.md; private names are left out. The exit code is 1 if anything
stable breaks. Run it in a checkout: python tools/api.py COMMIT.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]


def classes() -> dict[str, str]:
    """Rows of the table of stability: name -> class."""
    page = (ROOT / "docs/reference/stability.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(triton_ep[\w.]*)` \| (\w+) \|", page, re.MULTILINE))


def class_of(name: str, rows: Mapping[str, str]) -> str:
    """Class of a name: the class of the longest row that is a prefix of it."""
    parts = name.split(".")
    return next(rows[row] for end in range(len(parts), 0, -1) if (row := ".".join(parts[:end])) in rows)


def public_names() -> list[str]:
    """Names listed in the reference."""
    return re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference/api.md").read_text(encoding="utf-8"), re.MULTILINE)


def homes(package: griffe.Object) -> dict[str, str]:
    """Place of definition -> public name."""
    found = {}
    for name in public_names():
        try:
            found[package[name.partition(".")[2]].canonical_path] = name
        except (KeyError, griffe.AliasResolutionError):  # created at import
            found[name] = name
    return found


def breaches(before: griffe.Object, now: griffe.Object) -> Iterator[tuple[str, str]]:
    """(class, breach) of every public name that breaks."""
    rows = classes()
    public = {**homes(now), **homes(before)}
    for breakage in griffe.find_breaking_changes(before, now):
        path = breakage.obj.canonical_path
        for home in (path, path.rpartition(".")[0]):  # the name itself, or a member of it
            if home in public:
                yield class_of(public[home], rows), f"{public[home].rpartition('.')[0]}.{_told(breakage)}"
                break


def _told(breakage: griffe.Breakage) -> str:
    """griffe's explanation in one line, without the place."""
    text = breakage.explain(griffe.ExplanationStyle.ONE_LINE)
    return re.sub(r"\x1b\[[\d;]*m", "", text).split(": ", 1)[-1]


def main(commit: str) -> int:
    """Print the breaches since a commit; returns the exit code."""
    before = griffe.load_git("triton_ep", ref=commit, repo=ROOT, search_paths=["."], resolve_aliases=True)
    found = sorted(breaches(before, griffe.load("triton_ep", search_paths=[str(ROOT)], resolve_aliases=True)))
    for kind, text in found:
        print(f"{kind}: {text}")
    print(f"{len(found)} public names or arguments differ from {commit}")
    return int(any(kind == "stable" for kind, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
