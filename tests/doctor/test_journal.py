"""The journal is bounded, and it survives what its process does not."""

import json
import os
import resource
from pathlib import Path

import pytest

from ddp_doctor.facts import journal
from ddp_doctor.facts.journal import Journal, read, write_whole


def test_a_journal_never_grows_beyond_its_bound_and_still_takes_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 2000)
    one = Journal(tmp_path)
    for number in range(1000):
        one.write("batch", iterator=number)
    one.write("end", raised=False)
    size = next(tmp_path.glob("*.jsonl")).stat().st_size
    assert size < 2100
    assert read(tmp_path)[0].facts["end"] == [{"raised": False}]


def test_a_line_cut_off_by_a_full_disk_is_left_out(tmp_path: Path) -> None:
    Journal(tmp_path).write("batch", iterator=1)
    path = next(tmp_path.glob("*.jsonl"))
    with path.open("a") as file:
        file.write('{"kind": "batch", "iter')
    assert read(tmp_path)[0].facts["batch"] == [{"iterator": 1}]


def test_a_forked_child_writes_nothing_into_its_parents_journal(tmp_path: Path) -> None:
    one = Journal(tmp_path)
    one.write("parent")
    child = os.fork()
    if child == 0:
        one.write("child")
        one.set_status("child")
        os._exit(0)
    os.waitpid(child, 0)
    text = next(tmp_path.glob("*.jsonl")).read_text()
    assert [json.loads(line)["kind"] for line in text.splitlines()] == ["parent"]


def test_a_script_may_close_all_descriptors_and_what_was_written_is_read_back_in_order(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    child = os.fork()
    if child == 0:
        one = Journal(tmp_path / "run")
        os.closerange(3, 4096)
        files = [os.open(tmp_path / f"own{n}", os.O_CREAT | os.O_RDWR) for n in range(64)]
        for number in range(5):
            one.write("batch", iterator=number)
        one.steps = 3
        one.set_status("all_reduce of shape [4] at train.py:7")
        os._exit(sum(os.fstat(file).st_size for file in files) > 0)
    assert os.waitpid(child, 0)[1] == 0, "the journal wrote into the script's own files"
    (journal_of_child,) = read(tmp_path / "run")
    assert journal_of_child.facts["batch"] == [{"iterator": number} for number in range(5)]
    now = journal_of_child.status
    assert now is not None
    assert (now.steps, now.doing) == (3, "all_reduce of shape [4] at train.py:7")
    assert not now.ended


def test_a_file_that_does_not_fit_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    write_whole(report, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            write_whole(report, "longer than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert report.read_text() == "old"
    assert list(tmp_path.iterdir()) == [report]
