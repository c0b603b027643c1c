"""All figures to play with on one page, without the book around them.

    python -m tests.figures.figure_pages    write _build/figures/index.html

The page works from file://.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from labkit.book.playable import FOLDER, opening, scripts
from labkit.launch.scripts import project_root

_PAGE = """\
<!DOCTYPE html>
<html lang="en" data-content_root="../html/">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Figures to play with</title>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = "CHOSEN" || (dark ? "dark" : "light");
</script>
<link rel="stylesheet" href="FOLDER/figure.css">
<style>
body { max-width: 54rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
button { font: inherit; }
html[data-theme="dark"] body { background: #14181e; color: #e6e8ea; }
</style>
SCRIPTS
</head>
<body>
<main>
<h1>Figures to play with</h1>
<button type="button" id="theme">Light or dark</button>
FIGURES
</main>
<script>
document.getElementById("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  dataset.theme = dataset.theme === "dark" ? "light" : "dark";
});
</script>
</body>
</html>
"""


def names(book: Path) -> list[str]:
    """The figures of the book, by name: every drawing script that has a logic script."""
    folder = book / FOLDER / "logic"
    return sorted(p.stem for p in folder.glob("*.js") if (book / FOLDER / p.name).is_file())


def page(book: Path, out: Path, figures: Sequence[str], theme: str = "", state: str = "") -> str:
    """A page with `figures` in `state`; their addresses are relative to the folder `out`.

    It starts in the theme "light" or "dark", or in the one that the reader's browser prefers.
    """
    folder = quote(Path(os.path.relpath(book / FOLDER, out)).as_posix())
    loaded = dict.fromkeys(script for name in figures for script in scripts(name))
    parts = {
        "CHOSEN": theme,
        "SCRIPTS": "\n".join(f'<script defer src="FOLDER/{one}"></script>' for one in loaded),
        "FIGURES": "\n".join(f"{opening(name, state)}\n</figure>" for name in figures),
        "FOLDER": folder,
    }
    text = _PAGE
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


if __name__ == "__main__":
    project = project_root()
    book, out = project / "book", project / "_build" / "figures"
    out.mkdir(parents=True, exist_ok=True)
    path = out / "index.html"
    path.write_text(page(book, out, names(book)))
    print(f"The figures: {path.as_uri()}")
