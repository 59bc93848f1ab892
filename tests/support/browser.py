"""Opens pages in a headless Chromium, at several widths, and tells what does not fit and what its console said."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WHY_NOT = "no Chromium here: apt-get install -y chromium"
LIMIT_S = 90.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-dev-shm-usage",
)  # fmt: skip

# Each page in a frame of its width: a window cannot be that narrow.
_FRAME = '<iframe style="border:0;width:%dpx;height:2000px" srcdoc="%s"></iframe>'
_OUTER = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">
%s<pre id="seen"></pre>
<script>
const name = (e) =>
  e.tagName + "." + (e.getAttribute("class") || "") + " " + (e.textContent || "").trim().slice(0, 60);
function misfits(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, wide = frame.clientWidth, found = [];
  for (const e of page.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect();
    if (box.width && (box.left < -0.5 || box.right > wide + 0.5)) found.push("outside: " + name(e));
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !(e instanceof view.SVGElement)
        && view.getComputedStyle(e).display !== "inline") found.push("overflows: " + name(e));
    if (e.tagName === "text") {
      const svg = e.ownerSVGElement.getBoundingClientRect();
      if (box.left < svg.left - 1 || box.right > svg.right + 1 || box.top < svg.top - 1 || box.bottom > svg.bottom + 1)
        found.push("cut off: " + name(e));
    }
  }
  if (page.documentElement.scrollWidth > wide) found.push("the page scrolls sideways");
  return {misfits: found, back: view.getComputedStyle(page.body).backgroundColor,
          elements: page.querySelectorAll("body *").length};
}
addEventListener("load", () => {
  const seen = Array.from(document.querySelectorAll("iframe"), misfits);
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
</script>"""


@dataclass(frozen=True)
class Look:
    """One page at one width.

    Attributes:
        misfits: what is cut off or reaches over an edge.
        back: the colour behind the page.
        elements: how many elements the page has.
    """

    misfits: list[str]
    back: str
    elements: int


def look(pages: Sequence[tuple[str, int]], *, dark: bool = False) -> tuple[list[Look], list[str]]:
    """Return what each page looks like, and the lines that the console got.

    Args:
        pages: HTML and the width in pixels that it is shown at, for each.
        dark: ask for the dark colours.
    """
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder) / "outer.html"
        frames = "".join(_FRAME % (width, html.escape(page)) for page, width in pages)
        outer.write_text(_OUTER % frames, encoding="utf-8")
        command = [CHROMIUM, *_FLAGS, f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                   f"--user-data-dir={folder}/profile", "--enable-logging=stderr", "--window-size=1600,2200",
                   "--virtual-time-budget=5000", "--dump-dom", outer.as_uri()]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    shown = re.search(r'<pre id="seen">(.+?)</pre>', ran.stdout, re.DOTALL)
    assert shown, ran.stdout[-2000:] + ran.stderr[-2000:]
    looks = [Look(**each) for each in json.loads(html.unescape(shown[1]))]
    return looks, [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]
