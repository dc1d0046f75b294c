"""Draw the pictures of these pages: `python docs/pictures/draw.py`, or `make pictures`.

Needs only the standard library. tests/unit/test_pictures.py fails if a stored picture is out of date.
"""

from pathlib import Path

import architecture
import layout
import losses
import speed
import timeline

DOCS = Path(__file__).resolve().parents[1]
PICTURES = {
    DOCS / "concepts/architecture.svg": architecture.draw,
    DOCS / "concepts/layout.svg": layout.draw,
    DOCS / "concepts/timeline.svg": timeline.draw,
    DOCS / "pictures/exchange.svg": speed.draw_exchange,
    DOCS / "pictures/losses.svg": losses.draw,
    DOCS / "pictures/speed.svg": speed.draw,
}


def main() -> None:
    """Write every picture to its place."""
    for path, draw in PICTURES.items():
        path.write_text(draw().svg())


if __name__ == "__main__":
    main()
