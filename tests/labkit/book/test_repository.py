"""The project's address is one setting: the files that repeat it agree, and can be set together."""

import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from labkit.book.repository import LINES, set_address
from labkit.launch.scripts import project_root

ADDRESS = "https://github.com/owner/name"
ROOT = project_root()


def addresses(root: Path) -> dict[str, str]:
    """What each file says; an empty string where it says nothing."""
    config = yaml.safe_load((root / "_config.yml").read_text())
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return {
        "_config.yml": config["repository"]["url"],
        "CITATION.cff": citation.get("repository-code", ""),
        "pyproject.toml": project.get("urls", {}).get("Repository", ""),
    }


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in LINES:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_three_files_of_the_project_agree():
    assert set(addresses(ROOT)) == set(LINES)
    assert len(set(addresses(ROOT).values())) == 1


def test_an_address_is_set_changed_and_removed_in_all_of_them(copy):
    set_address(copy, "")
    empty = {name: (copy / name).read_text() for name in LINES}
    for address in (ADDRESS, "https://github.com/owner/other", ""):
        set_address(copy, address + "/" if address else "")
        assert set(addresses(copy).values()) == {address}
    assert {name: (copy / name).read_text() for name in LINES} == empty


@pytest.mark.parametrize("copied", [f"{ADDRESS}.git", f" {ADDRESS}/ "])
def test_an_address_is_taken_as_it_is_copied(copy, copied):
    set_address(copy, copied)
    assert set(addresses(copy).values()) == {ADDRESS}


@pytest.mark.parametrize(
    "address",
    ["https://example.org/owner/name", f"{ADDRESS}?tab=readme", f"{ADDRESS}#readme", f'{ADDRESS}"'],
)
def test_an_address_that_no_button_can_use_changes_no_file(copy, address):
    before = {name: (copy / name).read_text() for name in LINES}
    with pytest.raises(ValueError, match="OWNER/NAME"):
        set_address(copy, address)
    assert {name: (copy / name).read_text() for name in LINES} == before


@pytest.mark.parametrize("name", ["_config.yml", "pyproject.toml"])
def test_a_file_that_has_lost_its_place_is_named_and_the_others_stay(copy, name):
    (copy / name).write_text("nothing")
    before = {other: (copy / other).read_text() for other in LINES}
    with pytest.raises(ValueError, match=f"{name} has no place"):
        set_address(copy, "https://github.com/owner/other")
    assert {other: (copy / other).read_text() for other in LINES} == before
