"""Write the section "Frameworks" of docs/support.md from docs/frameworks.toml."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/support.md"
BEGIN, END = "## Frameworks\n", "## Stability\n"


def table() -> dict[str, Any]:
    """docs/frameworks.toml."""
    return tomllib.loads((ROOT / "docs/frameworks.toml").read_text())


def section() -> str:
    """The section, including its heading."""
    found = table()
    lines = ["| Framework | Version | What ran | Where | Date | Repeated by |", "|---|---|---|---|---|---|"]
    for run in found["run"]:
        again = f"`pytest {' '.join(run['tests'])}`" if "tests" in run else "not in this repository"
        if "needs" in run:
            again += f", with {' and '.join(f'`{each}`' for each in run['needs'])}"
        name = f"[{run['name']}](how-to/{run['page']})"
        lines.append(f"| {name} | {run['version']} | {run['what']} | {run['where']} | {run['date']} | {again} |")
    not_run = "\n".join(f"- {each}" for each in found["not-run"]["what"])
    head = (
        "Interface: names and calls, without the framework's own code. `make peers` installs what the tests need, and"
    )
    return f"{BEGIN}\n{head}\nruns them.\n\n" + "\n".join(lines) + f"\n\nNot run:\n\n{not_run}\n\n"


def page() -> str:
    """The page with an up-to-date section."""
    text = PAGE.read_text()
    return text[: text.index(BEGIN)] + section() + text[text.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(page())
