"""What to do where a script cannot be judged: compare two commands, or write its step as functions.

Neither has to find out what a sample is: here the user says it.
"""

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

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
    first, second = (
        shlex.join(["torchrun", "--nproc-per-node", str(count), *command]) for count in (ranks, 1)
    )
    line = f'    python -m ddp_doctor compare "{first}" \\\n        "{second}"'
    said = "    # in the second, make the batch as large as that of all ranks"
    return f"{COMPARE}\n{line}\n{said}\n\nOr write {FUNCTIONS}{functions}"
