"""All figures to play with on one page, without the book around them; and their still pictures.

    python -m labkit.book.playable_page            write _build/figures/index.html
    python -m labkit.book.playable_page stills     draw each figure's still picture into the book

The page works from file://. The still pictures need Chromium: a figure is drawn in it as it
starts, in the light colors, 640 px wide.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from urllib.parse import quote

from labkit.book.playable import FOLDER, opening, scripts, still
from labkit.launch.scripts import project_root

# What a browser needs to run without a display, a sandbox, or a network.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_STYLE = """
body { max-width: 54rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
button { font: inherit; }
html[data-theme="dark"] body { background: #14181e; color: #e6e8ea; }
"""
_FIRST_THEME = """
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = "CHOSEN" || (dark ? "dark" : "light");
"""
_THEME = """
document.getElementById("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  dataset.theme = dataset.theme === "dark" ? "light" : "dark";
});
"""
# Puts a figure's drawing into the page as text, where --dump-dom shows it.
_STILL = """
<script>
addEventListener("load", () => {
  const out = document.createElement("pre");
  out.id = "still";
  out.textContent = JSON.stringify(Figures.still("NAME"));
  document.body.append(out);
});
</script>
"""


def names(book: Path) -> list[str]:
    """The figures of the book, by name: every drawing script that has a logic script."""
    folder = book / FOLDER / "logic"
    return sorted(p.stem for p in folder.glob("*.js") if (book / FOLDER / p.name).is_file())


def page(book: Path, out: Path, figures: Sequence[str], theme: str = "") -> str:
    """A page with `figures`, whose addresses are relative to the folder `out`.

    It starts in the theme "light" or "dark", or in the one that the reader's browser prefers.
    """
    folder = quote(Path(os.path.relpath(book / FOLDER, out)).as_posix())
    loaded = dict.fromkeys(script for name in figures for script in scripts(name))
    shown = "\n".join(f"{opening(name)}\n</figure>" for name in figures)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en" data-content_root="../html/">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>Figures to play with</title>",
            f"<script>{_FIRST_THEME.replace('CHOSEN', theme)}</script>",
            f'<link rel="stylesheet" href="{folder}/figure.css">',
            f"<style>{_STYLE}</style>",
            *(f'<script defer src="{folder}/{script}"></script>' for script in loaded),
            "</head>",
            "<body>",
            "<main>",
            "<h1>Figures to play with</h1>",
            '<button type="button" id="theme">Light or dark</button>',
            shown,
            "</main>",
            f"<script>{_THEME}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def write_page(book: Path, out: Path) -> Path:
    """Write the page with all figures to `out`/index.html; return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "index.html"
    path.write_text(page(book, out, names(book)))
    return path


def browser() -> str:
    """The path of a Chromium. Raises RuntimeError if there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        searched = ", ".join(BROWSERS)
        raise RuntimeError(
            f"none of {searched} is on the path; on Debian: apt-get install chromium"
        )
    return found


def draw_stills(book: Path, figures: Sequence[str], width: int = 640) -> list[Path]:
    """Draw the still pictures of `figures` with Chromium; return their paths.

    Raises RuntimeError if there is no such figure, if there is no browser, or if a figure did not
    draw itself.
    """
    known = names(book)
    if unknown := [name for name in figures if name not in known]:
        raise RuntimeError(f"there is no figure {', '.join(unknown)}; there are {', '.join(known)}")
    written = []
    with tempfile.TemporaryDirectory(prefix="stills-") as scratch:
        for name in figures:
            text = page(book, Path(scratch), [name])
            text = text.replace("54rem", f"{width + 34}px; box-sizing: content-box")
            path = Path(scratch) / "still.html"
            path.write_text(text.replace("</body>", _STILL.replace("NAME", name) + "</body>"))
            profile = f"--user-data-dir={scratch}/profile"
            ended = subprocess.run(
                [browser(), *FLAGS, "--window-size=1280,900", profile, "--dump-dom", path.as_uri()],
                capture_output=True,
                text=True,
                timeout=120,
            )
            if ended.returncode:
                raise RuntimeError(f"the browser ended with {ended.returncode}:\n{ended.stderr}")
            found = re.search(r'<pre id="still">(.*?)</pre>', ended.stdout, re.DOTALL)
            if found is None:
                raise RuntimeError(f"the figure {name!r} did not draw itself; see make figures")
            target = book / FOLDER / still(name)
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.loads(unescape(found[1])) + "\n")
            written.append(target)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    to_draw = commands.add_parser("stills", help="draw the still pictures")
    to_draw.add_argument("figures", nargs="*", help="default: all of them")
    arguments = parser.parse_args()
    root = project_root()
    if arguments.command == "stills":
        try:
            paths = draw_stills(root / "book", arguments.figures or names(root / "book"))
        except RuntimeError as error:
            sys.exit(str(error))
        for path in paths:
            print(f"  {path.relative_to(root)}  {path.stat().st_size / 1000:.1f} kB")
    else:
        print(f"The figures: {write_page(root / 'book', root / '_build' / 'figures').as_uri()}")


if __name__ == "__main__":
    main()
