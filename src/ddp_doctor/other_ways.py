"""What to do where a script cannot be judged: compare two commands, or write its step as functions.

Neither has to find out what a sample is: here the user says it.
"""

import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

BATCH = re.compile(r"-{1,2}[\w-]*(batch|bs)[\w-]*|[\w.]*batch[\w.]*=\d+", re.I)  # a batch's size
COMPARE = "Compare two commands instead: the second gets the samples of all ranks in one batch.\n"
FUNCTIONS = "its step as functions in a test, which say what a sample is:\n"
TEST = """
from ddp_doctor.testing import assert_certified

def make_model():
    return ...  # as {script} makes it, wrapped as there

def batches(rank, world_size):
    yield ...  # the batch of one step on this rank, as tensors with a row per sample

def backward(model, batch):
    loss.backward()  # all that {script} does before optimizer.step()

def test_the_ranks_compute_the_gradient_of_one_process():
    assert_certified(make_model=make_model, backward=backward, batches=batches, ranks={ranks})
"""


def other_ways(command: Sequence[str], ranks: int, launched: bool = True) -> str:
    """The two other ways to measure a script, filled in with what is known of it.

    `command` is the script with its arguments (or `-m` and a module). `launched`: whether a
    launcher starts its ranks; else no command says how many there are.
    """
    script = Path(command[command[0] == "-m"]).name
    test = TEST.format(script=script, ranks=ranks).strip()
    functions = "\n" + textwrap.indent(test, "    ")
    if not launched:
        return f"Write {FUNCTIONS}{functions}"
    words, grown = list(command), _of_all_ranks(command, ranks)
    first = shlex.join(["torchrun", "--nproc-per-node", str(ranks), *words])
    second = shlex.join(["torchrun", "--nproc-per-node", "1", *(grown or words)])
    said = "" if grown else "\n    # in the second, make the batch as large as that of all ranks"
    line = f'    python -m ddp_doctor compare "{first}" \\\n        "{second}"'
    return f"{COMPARE}\n{line}{said}\n\nOr write {FUNCTIONS}{functions}"


def _of_all_ranks(command: Sequence[str], ranks: int) -> list[str] | None:
    """The command with the batch of all ranks; None if no argument names one batch size."""
    words = list(command)
    found = []
    for at, word in enumerate(words[1:], 1):
        name, equals, value = word.partition("=")
        if not BATCH.fullmatch(name) and not BATCH.fullmatch(word):
            continue
        if equals and value.isdigit():
            found.append((at, f"{name}={int(value) * ranks}"))
        elif not equals and at + 1 < len(words) and words[at + 1].isdigit():
            found.append((at + 1, str(int(words[at + 1]) * ranks)))
    if len(found) != 1:
        return None
    words[found[0][0]] = found[0][1]
    return words
