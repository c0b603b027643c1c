"""Every address in the doctor's texts is in the book: a page of its table of contents, a label."""

import ast
import re
from email.message import Message
from importlib import metadata
from pathlib import Path

from ddp_doctor.explain.findings import CATALOG, to_read
from labkit.launch import project_root

ROOT = project_root()
ADDRESS = re.compile(r"\b(?:book|labs)/[\w./-]+\.(?:ipynb|md|py)(?:#([\w-]+))?")


def texts() -> str:
    """All strings in the doctor's sources, those of the catalog included."""
    found = [page for *_, page in CATALOG.values()]
    for path in sorted((ROOT / "src/ddp_doctor").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        found += [n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is str]
    return "\n".join(found)


def test_every_address_exists_in_the_built_book() -> None:
    contents = next(ROOT.rglob("book/_toc.yml")).read_text()
    addresses = {one.group(0): one.group(1) for one in ADDRESS.finditer(texts())}
    assert len(addresses) > 10
    for address, label in addresses.items():
        path = Path(ROOT, address.partition("#")[0])
        assert path.exists(), address
        if path.suffix != ".py":
            assert str(path.relative_to(ROOT / "book").with_suffix("")) in contents, address
        if label:
            assert f"({label})=" in path.read_text(), address


def test_an_installed_doctor_leads_to_the_published_page_or_to_none(monkeypatch) -> None:
    assert to_read("book/start/when_to_multiply.ipynb") == "book/start/when_to_multiply.ipynb"
    assert to_read("book/not/here.ipynb") == ""
    links = Message()
    links["Project-URL"] = "Book, https://example.org/book/"
    monkeypatch.setattr(metadata, "metadata", lambda name: links)
    assert to_read("book/not/here.ipynb") == "https://example.org/book/not/here.html"
