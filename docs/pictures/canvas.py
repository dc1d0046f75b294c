"""A canvas for the pictures of these pages: SVG with light and dark colours, legible at the width of a phone.

Every picture is 720 units wide, with text of 22 units or more, which a phone shows at 11 pixels. It has its own
background, so it is legible on any page.
"""

from html import escape

WIDTH = 720
_LIGHT = {
    "bg": "#ffffff",
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#8c959f",
    "frame": "#f3f5f7",
    "box": "#ffffff",
    "a": "#0b6bcb",
    "b": "#0f8a5f",
    "c": "#c2410c",
    "other": "#9aa4af",
    "on": "#ffffff",
}
_DARK = {
    "bg": "#15191f",
    "ink": "#e6edf3",
    "soft": "#a6b1bd",
    "line": "#7d8894",
    "frame": "#1f252d",
    "box": "#2a323c",
    "a": "#58a6ff",
    "b": "#4cc38a",
    "c": "#ff9a5c",
    "other": "#6b7684",
    "on": "#10141a",
}


def _rules(colours: dict[str, str]) -> str:
    return "".join(f".f-{name}{{fill:{value}}}.s-{name}{{stroke:{value}}}" for name, value in colours.items())


class Canvas:
    """Shapes in drawing order; coordinates in units, colours by name.

    Args:
        height: units from top to bottom.
        title: text for screen readers.
    """

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        stroke: str | None = None,
        dashed: bool = False,
        radius: float = 6,
    ) -> None:
        """Draw a rectangle with its upper left corner at (x, y)."""
        border = f' stroke-width="2"{" stroke-dasharray=" + chr(34) + "6 5" + chr(34) if dashed else ""}' * bool(stroke)
        classes = f"f-{fill}" + (f" s-{stroke}" if stroke else "")
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" class="{classes}"{border}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 22,
        colour: str = "ink",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Write words whose baseline starts, ends or is centred at (x, y)."""
        weight = ' font-weight="600"' if bold else ""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" class="f-{colour}"{at}{weight}>{escape(words)}</text>'
        )

    def line(self, points: list[tuple[float, float]], colour: str, width: float, dashed: bool = False) -> None:
        """Draw a line through the points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="9 6"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" class="s-{colour}" stroke-width="{width:g}" '
            f'stroke-linejoin="round"{dash}/>'
        )

    def arrow(self, points: list[tuple[float, float]], colour: str = "ink", dashed: bool = False) -> None:
        """Draw a line through the points, with an arrowhead at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="9 6"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" class="s-{colour}" stroke-width="3.5"{dash} '
            f'marker-end="url(#head-{colour})"/>'
        )

    def svg(self) -> str:
        """The picture as SVG text."""
        heads = "".join(
            f'<marker id="head-{name}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="5" markerHeight="5" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" class="f-{name}"/></marker>'
            for name in ("ink", "a", "b", "c")
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>{_rules(_LIGHT)}@media (prefers-color-scheme: dark){{{_rules(_DARK)}}}</style>\n"
            f"<defs>{heads}</defs>\n"
            f'<rect width="{WIDTH}" height="{self.height}" rx="10" class="f-bg"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )
