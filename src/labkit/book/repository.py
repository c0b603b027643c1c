"""The project's public address: stored once, and repeated wherever a reader or a program looks.

    python -m labkit.book.repository https://github.com/…    set it
    python -m labkit.book.repository ""                      unset it

The setting is `repository: url` in `_config.yml`. The pages take it from there when the book is
built. `CITATION.cff` and `pyproject.toml` cannot read another file, so this command writes them,
too. As long as no address is set, pages speak of "the folder that this book came in".
"""

import argparse
import re
import sys
from pathlib import Path

import yaml

from labkit.launch.scripts import project_root

REPOSITORY = re.compile(r"https://github\.com/[\w-]+/[\w.-]+", re.ASCII)
# In each file: the place of the address (or where it would be), what to write there, and what
# to leave there without an address.
LINES = {
    "_config.yml": (r'(?<=^repository:\n  url: )".*"$', '"{}"', '""'),
    "CITATION.cff": (r"^repository-code: .*\n|\Z", 'repository-code: "{}"\n', ""),
    "pyproject.toml": (
        r'\n\[project\.urls\]\nRepository = ".*"\n|(?<=^dependencies = \["torch>=\d\.\d\d"\]\n)',
        '\n[project.urls]\nRepository = "{}"\n',
        "",
    ),
}


def checked(address: str) -> str:
    """`address`, without the `.git` that GitHub adds to what one copies there.

    Raises ValueError if it is not empty and not a repository on GitHub.
    """
    address = address.strip().rstrip("/").removesuffix(".git")
    if address and not REPOSITORY.fullmatch(address):
        raise ValueError(
            f"the repository is {address!r}; launch buttons and links need"
            " https://github.com/OWNER/NAME. Leave it empty to build without them."
        )
    return address


def set_address(root: Path, address: str) -> None:
    """Write `address` to the files of the project in `root`; an empty one removes it."""
    address = checked(address)
    texts = {}
    for name, (place, line, without) in LINES.items():
        text = (root / name).read_text()
        found = re.search(place, text, re.MULTILINE)
        if not found:
            raise ValueError(f"{root / name} has no place for the repository's address")
        new = line.format(address) if address else without
        texts[name] = text[: found.start()] + new + text[found.end() :]
    for name, text in texts.items():
        (root / name).write_text(text)


def clone_command(address: str) -> str:
    """The command from nothing to the project's folder."""
    return f"git clone {address} && cd {address.rpartition('/')[2]}"


def start_lines(address: str) -> str:
    """The Markdown of "Get the code": the commands from nothing to an open chapter."""
    commands = [
        "make book        # run every chapter and build the book",
        "make notebook    # open a chapter in JupyterLab",
    ]
    before = "In the folder that this book came in:"
    if address:
        before = "You need Python 3.11 or newer and `make`:"
        commands.insert(0, clone_command(address))
    return "\n".join([before, "", "```bash", *commands, "```"])


def install_lines(address: str) -> str:
    """The Markdown of "Install it": what puts `miniddp` and `ddp_doctor` into an environment."""
    where, what = "In the folder that this book came in:", "."
    if address:
        where, what = "In your own environment:", f"git+{address}"
    return "\n".join([where, "", "```bash", f"pip install {what}", "```"])


def citation(address: str, title: str, authors: str, year: str) -> str:
    """The Markdown of the book's BibTeX entry."""
    fields = {"title": title, "author": f"{{{authors}}}", "year": year}
    if address:
        fields["url"] = address
    lines = [f"  {name:6} = {{{value}}}," for name, value in fields.items()]
    return "\n".join(["```bibtex", "@misc{how-gradients-are-combined,", *lines, "}", "```"])


def substitutions(address: str, cff: str, year: str) -> dict[str, str]:
    """What `{{ name }}` stands for on the pages; `cff` is the text of CITATION.cff."""
    cited = yaml.safe_load(cff)
    authors = " and ".join(author["name"] for author in cited["authors"])
    return {
        "get_the_code": start_lines(address),
        "install_it": install_lines(address),
        "citation": citation(address, cited["title"], authors, year),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="https://github.com/…, or an empty string")
    try:
        set_address(project_root(), parser.parse_args().address)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
