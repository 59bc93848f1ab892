"""Opens a page in a headless Chromium, at a width, and tells what does not fit and what its console said."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WHY_NOT = "no Chromium here: apt-get install -y chromium"
LIMIT_S = 60.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-dev-shm-usage",
)  # fmt: skip

# The page in a frame of the width that is asked for: the window itself cannot be that narrow.
_FRAME = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">
<style>body { margin: 0 }</style>
<iframe id="page" style="border:0;width:%(width)dpx;height:%(height)dpx" srcdoc="%(page)s"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {
  const page = document.getElementById("page").contentDocument, wide = %(width)d, found = [];
  const name = (e) =>
    e.tagName + "." + (e.getAttribute("class") || "") + " " + (e.textContent || "").trim().slice(0, 60);
  for (const e of page.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect();
    if (box.width && (box.left < -0.5 || box.right > wide + 0.5)) found.push("outside: " + name(e));
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !(e instanceof page.defaultView.SVGElement)
        && page.defaultView.getComputedStyle(e).display !== "inline") found.push("overflows: " + name(e));
    if (e.tagName === "text") {
      const svg = e.ownerSVGElement.getBoundingClientRect();
      if (box.left < svg.left - 1 || box.right > svg.right + 1 || box.top < svg.top - 1 || box.bottom > svg.bottom + 1)
        found.push("cut off: " + name(e));
    }
  }
  if (page.documentElement.scrollWidth > wide) found.push("the page scrolls sideways");
  const scheme = page.defaultView.getComputedStyle(page.body).backgroundColor;
  document.getElementById("found").textContent =
    JSON.stringify({found, scheme, elements: page.querySelectorAll("body *").length});
});
</script>"""


def look(page: str, width: int, *, dark: bool = False) -> dict[str, object]:
    """Return what does not fit at a width, how many elements there are, and the lines that the console got.

    Args:
        page: HTML.
        width: of the page, in pixels.
        dark: ask for the dark colours.
    """
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder) / "outer.html"
        outer.write_text(
            _FRAME % {"width": width, "height": 3000, "page": html.escape(page)}, encoding="utf-8"
        )
        scheme = (f"--blink-settings=preferredColorScheme={0 if dark else 1}",)
        command = [CHROMIUM, *_FLAGS, *scheme, f"--user-data-dir={folder}/profile", "--enable-logging=stderr",
                   f"--window-size={max(width, 800)},3200", "--virtual-time-budget=5000", "--dump-dom",
                   outer.as_uri()]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    shown = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert shown, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = dict(json.loads(html.unescape(shown[1])))
    found["console"] = [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]
    return found
