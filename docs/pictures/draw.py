"""Draws the pictures of docs/ as SVG: `python docs/pictures/draw.py`. Boxes come from lowshard's own layouts.

A page is 360 to 700 pixels wide, so pictures are 420 units wide and letters 12 units high.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded

WIDTH = 420
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
INK, PALE, LINE = "#222", "#eceff1", "#90a4ae"


class Picture:
    """Shapes on a white ground."""

    def __init__(self, height: int, told: str) -> None:
        self.height, self.told = height, told
        self.shapes: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, line: str = "none", dashed: bool = False
    ) -> None:
        """Draw a rectangle."""
        dash = ' stroke-dasharray="3 2"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{line}"{dash}/>'
        )

    def text(
        self, x: float, y: float, words: str, at: str = "middle", fill: str = INK, bold: bool = False
    ) -> None:
        """Write words; y is their base line."""
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" fill="{fill}"{weight}>{escape(words)}</text>'
        )

    def line(self, points: Iterable[tuple[float, float]], arrow: bool = True, line: str = INK) -> None:
        """Draw a line through points, with an arrow at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{line}" stroke-width="1.3"{head}/>'
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
        )
        size = f'width="{WIDTH * 1.3:g}" height="{self.height * 1.3:g}" viewBox="0 0 {WIDTH} {self.height}"'
        letters = 'font-family="sans-serif" font-size="12" role="img"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {letters}>',
            f"<title>{escape(self.told)}</title>",
            f"<defs>{head}</defs>",
            f'<rect width="{WIDTH}" height="{self.height}" fill="#fff"/>',
            *self.shapes,
            "</svg>",
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def array(
    p: Picture, x: float, y: float, cell: float, layout: Layout, ranks: Iterable[int], words: bool = True
) -> None:
    """Draw an array with the boxes of some ranks."""
    rows, cols = layout.shape
    p.rect(x, y, cols * cell, rows * cell, PALE)
    for rank in ranks:
        (top, bottom), (left, right) = layout.box(rank)
        p.rect(
            x + left * cell, y + top * cell, (right - left) * cell, (bottom - top) * cell, RANKS[rank], "#fff"
        )
        if words and bottom > top and right > left:
            p.text(
                x + (left + right) * cell / 2,
                y + (top + bottom) * cell / 2 + 4,
                str(rank),
                fill="#fff",
                bold=True,
            )
    p.rect(x, y, cols * cell, rows * cell, "none", LINE)


def move() -> Picture:
    """Rows to columns over four ranks."""
    p = Picture(206, "An array sharded by rows over four ranks, and then by columns")
    mesh = DeviceMesh((4,), ("tp",))
    rows, columns = (Layout(mesh, (8, 8), "float32", (Sharded(dim),)) for dim in (0, 1))
    array(p, 6, 24, 19, rows, range(4), words=False)
    for rank in range(4):
        p.text(25, 24 + 38 * rank + 23, str(rank), fill="#fff", bold=True)
    array(p, 262, 24, 19, columns, range(4))
    p.text(82, 15, "tp=S0: rows", bold=True)
    p.text(338, 15, "tp=S1: columns", bold=True)
    for place in (1, 2, 3):  # what rank 0 gives away
        p.rect(6 + place * 38, 24, 38, 38, "none", "#000", dashed=True)
        p.rect(262 + place * 38, 24, 38, 38, "none", "#000", dashed=True)
    p.line([(166, 43), (254, 43)])
    p.text(210, 36, "3 boxes")
    p.text(210, 58, "from rank 0")
    p.text(210, 196, "each rank keeps one box of its own, and sends one to each other rank")
    return p


def placements() -> Picture:
    """What four ranks hold of an array for four layouts."""
    p = Picture(386, "What each rank of a 2 x 2 mesh holds, for four layouts")
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    cases = (
        ("dp=S0 tp=S1", "each a quarter", (Sharded(0), Sharded(1))),
        ("dp=S0 tp=R", "rows over dp, copied along tp", (Sharded(0), Replicated())),
        ("dp=R tp=R", "a whole copy each", (Replicated(), Replicated())),
        ("dp=P tp=S1", "terms of a sum along dp", (Partial("sum"), Sharded(1))),
    )
    for number, (name, told, where) in enumerate(cases):
        layout = Layout(mesh, (4, 4), "float32", where)
        x, y = 8 + number % 2 * 212, 20 + number // 2 * 194
        p.text(x + 96, y - 6, name, bold=True)
        for rank in range(4):
            dp, tp = mesh.coord(rank)
            left, top = x + 26 + tp * 74, y + 20 + dp * 68
            array(p, left, top, 13, layout, [rank], words=False)
            if name.startswith("dp=P"):
                (a, b), (c, d) = layout.box(rank)
                p.text(left + (c + d) * 6.5, top + (a + b) * 6.5 + 4, "+", fill="#fff", bold=True)
            p.text(left + 26, top + 63, f"rank {rank}")
        p.text(x + 52, y + 13, "tp 0")
        p.text(x + 126, y + 13, "tp 1")
        p.text(x + 22, y + 50, "dp 0", "end")
        p.text(x + 22, y + 118, "dp 1", "end")
        p.text(x + 96, y + 168, told)
    return p


def boxes() -> Picture:
    """Uneven splits and nested ones."""
    p = Picture(262, "A box of an array, balanced and ceiling splits, and two axes on one dim")
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    layout = Layout(mesh, (5, 8), "float32", (Sharded(0), Sharded(1)))
    array(p, 34, 40, 19, layout, range(4))
    p.text(110, 14, "[5, 8] over dp=S0 tp=S1", bold=True)
    p.text(72, 34, "0:4")
    p.text(148, 34, "4:8")
    p.text(30, 72, "0:3", "end")
    p.text(30, 120, "3:5", "end")
    p.text(110, 154, "rank 2: ((3, 5), (0, 4))")
    four = DeviceMesh((4,), ("tp",))
    for number, split in enumerate(("balanced", "ceil")):
        x = 250 + number * 92
        cut = Layout(four, (5, 2), "float32", (Sharded(0, split=split),))  # type: ignore[arg-type]  # one of the two
        array(p, x, 40, 19, cut, range(4))
        sizes = [cut.local_shape(rank)[0] for rank in range(4)]
        p.text(x + 19, 34, split)
        p.text(x + 19, 154, ", ".join(map(str, sizes)))
    p.text(316, 14, "5 rows over 4 ranks", bold=True)
    for number, (names, told) in enumerate(
        ((("dp", "tp"), "dp outside, tp inside"), (("tp", "dp"), "tp outside, dp inside"))
    ):
        nested = Layout.from_spec(mesh, (1, 8), "float32", (None, names))
        x = 34 + number * 216
        p.text(x + 76, 196, f'(None, ("{names[0]}", "{names[1]}"))', bold=True)
        array(p, x, 206, 19, nested, range(4))
        p.text(x + 76, 246, told)
    return p


def plans() -> Picture:
    """From two layouts to moved bytes."""
    p = Picture(268, "Each rank makes the plan by itself; digests are compared; then bytes move")
    p.rect(20, 10, 170, 34, PALE, LINE)
    p.text(105, 31, "source layout")
    p.rect(230, 10, 170, 34, PALE, LINE)
    p.text(315, 31, "destination layout")
    for rank in range(4):
        x = 10 + rank * 102
        p.line([(105, 44), (x + 47, 84)], line=LINE, arrow=False)
        p.line([(315, 44), (x + 47, 84)], line=LINE, arrow=False)
        p.rect(x, 84, 94, 46, RANKS[rank])
        p.text(x + 47, 103, f"rank {rank}", fill="#fff", bold=True)
        p.text(x + 47, 120, "plan 9c41...", fill="#fff")
        p.line([(x + 47, 130), (x + 47, 152)])
        p.line([(x + 47, 182), (x + 47, 206)])
    p.rect(10, 154, 400, 28, PALE, LINE)
    p.text(210, 172, "digests are compared: equal on all ranks, or one error on all")
    for rank in range(4):
        x = 10 + rank * 102
        p.rect(x, 208, 94, 26, "#fff", RANKS[rank])
        p.text(x + 47, 225, "its boxes move")
    p.text(210, 256, "nothing is sent to make a plan")
    return p


def sum_orders() -> Picture:
    """A balanced tree and a chain."""
    p = Picture(250, "Order tree adds neighbours first; order rank adds one rank after the other")
    p.text(105, 16, 'order="tree"', bold=True)
    p.text(315, 16, 'order="rank"', bold=True)

    def leaf(x: float, rank: int) -> None:
        p.rect(x - 16, 196, 32, 24, RANKS[rank])
        p.text(x, 212, f"x{rank}", fill="#fff", bold=True)

    def plus(x: float, y: float, parts: tuple[tuple[float, float], ...]) -> None:
        for a, b in parts:
            p.line([(a, b), (x, y + 12)], arrow=False, line=LINE)
        p.rect(x - 13, y - 12, 26, 24, "#fff", INK)
        p.text(x, y + 5, "+", bold=True)

    left = [30 + 50 * rank for rank in range(4)]
    plus((left[0] + left[1]) / 2, 130, ((left[0], 196), (left[1], 196)))
    plus((left[2] + left[3]) / 2, 130, ((left[2], 196), (left[3], 196)))
    plus(105, 60, (((left[0] + left[1]) / 2, 118), ((left[2] + left[3]) / 2, 118)))
    right = [240 + 50 * rank for rank in range(4)]
    plus(265, 150, ((right[0], 196), (right[1], 196)))
    plus(300, 102, ((265, 138), (right[2], 196)))
    plus(335, 54, ((300, 90), (right[3], 196)))
    for rank in range(4):
        leaf(left[rank], rank)
        leaf(right[rank], rank)
    p.text(105, 240, "(x0 + x1) + (x2 + x3)")
    p.text(315, 240, "((x0 + x1) + x2) + x3")
    return p


def versions() -> Picture:
    """Two sets of arrays, and when they are switched."""
    p = Picture(226, "Version 2 arrives in the second set of arrays; after the vote it is served")
    old, new = RANKS[0], RANKS[1]
    p.text(8, 62, "set A", "start")
    p.text(8, 112, "set B", "start")
    p.rect(56, 42, 204, 32, old)
    p.text(158, 63, "version 1 is served", fill="#fff", bold=True)
    p.rect(260, 42, 154, 32, PALE, LINE)
    p.text(337, 63, "free for version 3")
    p.rect(56, 92, 56, 32, PALE, LINE)
    p.text(84, 113, "free")
    p.rect(112, 92, 92, 32, "#fff", new, dashed=True)
    p.text(158, 113, "2 arrives")
    p.rect(204, 92, 56, 32, "#fff", new)
    p.text(232, 113, "whole")
    p.rect(260, 92, 154, 32, new)
    p.text(337, 113, "version 2 is served", fill="#fff", bold=True)
    for x, word in ((112, "push"), (204, "vote"), (260, "switch")):
        p.line([(x, 22), (x, 41)], arrow=False)
        p.line([(x, 75), (x, 140)], arrow=False)
        p.text(x, 16, word, bold=True)
    p.line([(56, 150), (414, 150)])
    p.text(414, 164, "time", "end")
    p.text(158, 186, "a rank dies before the switch:")
    p.text(158, 202, "version 1 stays, whole", bold=True)
    p.text(337, 186, "after it:")
    p.text(337, 202, "version 2, whole", bold=True)
    return p


PICTURES = {
    "move": move,
    "placements": placements,
    "boxes": boxes,
    "plans": plans,
    "sum-orders": sum_orders,
    "versions": versions,
}


def main(folder: Path) -> None:
    """Write every picture."""
    for name, draw in PICTURES.items():
        draw().save(folder / f"{name}.svg")


if __name__ == "__main__":
    main(Path(__file__).parent)
