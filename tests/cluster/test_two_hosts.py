"""Two hosts on this machine, of which nothing stays behind: labs/two_hosts.sh makes a network that
carries torchrun's ranks, and labs/slurm runs its batch file on a true Slurm of two nodes.
"""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from processes import all_gone, processes_with

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root
from labkit.scenarios.toy_captioner import gradient_norms, seeded_toy_captioner, seeded_toy_data

ROOT = project_root()
TWO_HOSTS = str(ROOT / "labs" / "two_hosts.sh")
SLURM = str(ROOT / "labs" / "slurm" / "one_machine.sh")
CHECK_HOST = r"""
    test "$(hostname)" = "host$TWO_HOSTS_NUMBER"
    test "$(python -c 'import socket; print(socket.gethostbyname(socket.gethostname()))')" = \
        "10.77.0.$((TWO_HOSTS_NUMBER + 1))"
    touch "$TWO_HOSTS_SHARED/$(hostname)"
    until [ -e "$TWO_HOSTS_SHARED/host0" ] && [ -e "$TWO_HOSTS_SHARED/host1" ]; do sleep 0.02; done
"""


def expect_the_threads_table(lines: list[str]) -> None:
    """One table for all ranks, with the norms of one process that has all eight samples."""
    data, model = seeded_toy_data(samples=8), seeded_toy_captioner()
    model(*data.tensors).backward()
    rows = [line.split() for line in lines]
    assert lines.count("equal on ranks 0–7") == 1
    for name, norm in gradient_norms(model).items():
        assert [row[1:] for row in rows if row and row[0] == name] == [[f"{norm:.4f}"] * 3]
    assert "largest difference between the three, on any rank: < 1e-06" in lines


def two_hosts(*words: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    return run_guarded([TWO_HOSTS, *words], timeout)


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def test_without_a_command_the_threads_lab_agrees_on_all_eight_ranks():
    expect_the_threads_table(two_hosts().stdout.splitlines())


def test_each_host_has_a_name_and_an_address_of_its_own_and_both_see_one_folder():
    before, folder = interfaces(), set(os.listdir("/dev/shm"))
    done = two_hosts("bash", "-euc", CHECK_HOST)
    assert done.returncode == 0, done.stderr
    assert interfaces() == before
    assert "host0" not in set(os.listdir("/dev/shm")) - folder


def test_what_one_host_sends_arrives_at_the_other_and_the_rate_holds_at_both_ends():
    talk = (
        "tc qdisc show dev eth0; python - <<END\n"
        "import os, socket\n"
        "if os.environ['TWO_HOSTS_NUMBER'] == '0':\n"
        "    print('heard', socket.create_server(('host0', 7)).accept()[0].recv(9))\n"
        "else:\n"
        "    while True:\n"
        "        try:\n"
        "            socket.create_connection(('host0', 7)).send(b'two nodes')\n"
        "            break\n"
        "        except ConnectionRefusedError:\n"
        "            pass\n"
        "END"
    )
    output = two_hosts("--rate", "100mbit", "bash", "-c", talk).stdout
    assert output.count("tbf") == output.count("rate 100Mbit burst 64Kb") == 2
    assert "heard b'two nodes'" in output


@pytest.mark.parametrize("number", [0, 1])
def test_a_failure_on_either_host_is_the_exit_code_and_the_other_host_is_stopped(number):
    command = f"[ $TWO_HOSTS_NUMBER = {number} ] && exit 7; sleep 6000"
    done = two_hosts("--grace", "1", "bash", "-c", command)
    assert done.returncode == 7
    assert "one host ended 1 s ago; the other is stopped" in done.stderr


WATCH = "while ip link show eth0 | grep -q LOWER_UP; do sleep 0.1; done; echo noticed"


def test_the_cable_is_unplugged_also_if_one_host_has_ended():
    watch = f"[ $TWO_HOSTS_NUMBER = 1 ] || {{ {WATCH}; }}"
    done = two_hosts("--unplug", "1", "--grace", "60", "bash", "-c", watch)
    assert done.stdout.count("noticed") == 1
    assert done.returncode == 0, done.stderr


@pytest.fixture
def instead_of(tmp_path, monkeypatch):
    """`instead_of(TOOL, SCRIPT)`: SCRIPT runs before TOOL, with the same arguments."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(tool: str, script: str) -> None:
        stand_in = tmp_path / tool
        stand_in.write_text(f'#!/bin/sh\n{script}\nexec {shutil.which(tool)} "$@"\n')
        stand_in.chmod(0o755)

    return write


@pytest.fixture
def before_host0_is_up(instead_of):
    """`before_host0_is_up(COMMAND)`: host 0 runs COMMAND before it plugs the cable in."""

    def run(command: str) -> None:
        instead_of("ip", f'[ "$(hostname) $*" = "host0 link set eth0 up" ] && {command}')

    return run


def test_the_cable_waits_for_a_host_whose_network_is_made_late(instead_of):
    instead_of("unshare", 'case "$*" in *"--on-host 1"*) sleep 1 ;; esac')
    # /proc may not show the network of a process that is just starting.
    instead_of("readlink", 'case "$1" in /proc/[0-9]*/ns/net) exit 1 ;; esac')
    done = two_hosts("bash", "-c", "ip -brief link show eth0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("eth0@") == 2


def test_the_command_starts_once_both_hosts_have_plugged_the_cable_in(before_host0_is_up):
    before_host0_is_up("sleep 2")
    started = "ip link show eth0 | grep -q LOWER_UP && echo with a carrier"
    done = two_hosts("--unplug", "1", "timeout", "100", "bash", "-c", f"{started}; {WATCH}")
    assert done.stdout.count("with a carrier") == 2
    assert done.stdout.count("noticed") == 2
    assert "the cable is unplugged" in done.stderr


def test_a_host_that_does_not_come_up_is_the_exit_code_and_the_other_is_stopped(
    before_host0_is_up,
):
    before_host0_is_up("exit 7")
    done = two_hosts("bash", "-c", "echo started")
    assert done.returncode == 7
    assert "started" not in done.stdout


@pytest.mark.parametrize("ending", ["Ctrl-C", "INT", "TERM", "HUP", "KILL"])
def test_however_it_ends_no_process_and_no_network_is_left(ending):
    before = interfaces()
    marker = f"two-hosts-ended-by-{ending}-{os.getpid()}"
    terminal, other_end = pty.openpty()

    def with_the_terminal() -> None:
        os.setsid()
        ioctl(other_end, termios.TIOCSCTTY, 0)

    script = subprocess.Popen(
        # As torchrun does, the command puts its workers into sessions of their own.
        [
            TWO_HOSTS,
            "bash",
            "-c",
            "setsid sleep 600 & echo started $(hostname); sleep 600",
        ],
        env={**os.environ, "MARKER": marker},
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        preexec_fn=with_the_terminal,
    )
    shown = b""
    while shown.count(b"started") < 2:
        assert select.select([terminal], [], [], 200)[0], "the two hosts did not start"
        shown += os.read(terminal, 4096)
    assert processes_with(marker)
    if ending == "Ctrl-C":
        os.write(terminal, b"\x03")
    else:
        script.send_signal(signal.Signals[f"SIG{ending}"])
    codes = {"Ctrl-C": 130, "INT": 130, "TERM": 143, "HUP": 143, "KILL": -signal.SIGKILL}
    assert script.wait(timeout=100) == codes[ending]
    # A network without a name lives as long as its processes.
    assert all_gone(marker)
    assert interfaces() == before
    os.close(terminal)
    os.close(other_end)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "fast", "true"], "--rate takes a whole number of kbit, mbit or gbit"),
        (["--unplug", "-1", "true"], "--unplug takes a whole number of seconds"),
        (["--speed", "1gbit", "true"], "there is no option --speed"),
        (["no_such_command"], 'there is no command "no_such_command"'),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_made(words, said):
    done = two_hosts(*words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("tool", "instead", "said"),
    [
        ("uname", "echo Darwin; exit", "network namespaces are Linux's, and this is Darwin"),
        ("unshare", "exit 1", "making namespaces is not allowed here: run it as root"),
    ],
)
def test_a_machine_that_cannot_is_told_so(tool, instead, said, instead_of):
    instead_of(tool, instead)
    done = two_hosts("true")
    assert done.returncode == 2
    assert said in done.stderr


# Slurm --------------------------------------------------------------------------------------------


def submit(*words: str, marker: str = "", timeout: float = 900.0):
    virtual_environment = str(Path(sys.executable).parent.parent)
    environment = {**os.environ, "VENV": virtual_environment, "MARKER": marker}
    return run_guarded([SLURM, *words], timeout, cwd=ROOT, env=environment)


def test_the_batch_file_prints_one_table_for_eight_ranks_of_two_nodes_and_leaves_nothing():
    marker = f"slurm-{os.getpid()}"
    done = submit(marker=marker)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^Slurm: job \d+ COMPLETED on host\[0-1\]$", done.stdout, re.MULTILINE)
    # torchrun puts [default0]: before the lines that it passes on.
    lines = [re.sub(r"^\[default\d\]:", "", line) for line in done.stdout.splitlines()]
    expect_the_threads_table(lines)
    assert all_gone(marker)
    assert not list(ROOT.glob("slurm-*.out"))
    assert not (ROOT / "logs").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("labs/no_such_lab.py", "no_such_lab.py"),
        ("labs/accumulate_vs_ddp_lightning.py", "without torchrun"),
    ],
)
def test_a_job_that_fails_is_said_to_have_failed(script, said):
    done = submit("labs/slurm/two_nodes.sbatch", script)
    assert done.returncode != 0
    assert re.search(r"^Slurm: job \d+ FAILED on host\[0-1\]$", done.stdout, re.MULTILINE)
    assert said in done.stdout
