"""Every address in the doctor's texts is in the book: a page of its table of contents, a label."""

import ast
import re
from pathlib import Path

from ddp_doctor.explain.findings import CATALOG
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
