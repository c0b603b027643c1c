"""Folders with a guessable name: nothing is taken from a folder that another user may have made."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_doctor.certificate import files
from ddp_doctor.certificate.program import common_folder

NOBODY = 65534


def of_another_user(path: Path) -> None:
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)


def link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


PLANTED = [
    pytest.param(
        of_another_user,
        "belongs to another user",
        marks=pytest.mark.skipif(os.getuid() != 0, reason="only root makes another user's folder"),
    ),
    (link, "is a link"),
    (open_to_all, "is open to other users"),
]


@pytest.mark.parametrize(("plant", "said"), PLANTED)
def test_a_certificates_folder_that_was_planted_is_refused(
    plant: Callable[[Path], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "run"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with common_folder() as folder:
        pass
    folder.rmdir()
    plant(folder)
    with pytest.raises(SystemExit, match=said), common_folder():
        pass


class Planted:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, ("harm",)


def test_a_pickle_that_runs_something_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "samples.0.pt"
    assert files.write(path, {"samples": Planted()})
    assert not path.exists()
    torch.save({"samples": Planted()}, path)
    with pytest.raises(pickle.UnpicklingError):
        files.read(path)
    assert not Path("harm").exists()
