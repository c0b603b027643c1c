"""The addresses of pages that are gone lead on."""

import yaml

from labkit.launch import project_root

ROOT = project_root()
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
MOVED = CONFIG["sphinx"]["config"]["moved_pages"]


def exists(page: str) -> bool:
    return any((ROOT / "book" / page).with_suffix(suffix).exists() for suffix in (".md", ".ipynb"))


def test_every_old_address_is_free_and_leads_to_a_page_that_exists():
    assert "labkit.book.moved" in CONFIG["sphinx"]["extra_extensions"]
    assert [old for old in MOVED if exists(old)] == []
    assert [new for new in MOVED.values() if not exists(new)] == []
