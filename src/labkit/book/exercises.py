"""Check a reader's answer to an exercise in a cell, and say what is wrong with it.

@checker
def check_average(average):
    found = run_ranks(step, 2, average)
    assert found == wanted, f"rank 0 has {found[0]}, and the average is {wanted[0]}"


check_average(my_average)  # prints "Right." or "Not yet: …"
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from labkit.launch.ranks import RanksTimeoutError, ends_when_stuck


def checker(check: Callable[..., Any]) -> Callable[..., None]:
    """`check`, but it prints "Right." if it returns, and "Not yet:" with the reason if it fails.

    It fails by an assertion, by a stub's NotImplementedError, and by ranks that do not return in
    time, or of which none has moved for two seconds: the message then says where each one waits.
    Any other exception prints "Not yet:", too, and passes through, because the reader needs its
    traceback.
    """

    @wraps(check)
    def run(*answers: Any) -> None:
        try:
            with ends_when_stuck(2):
                check(*answers)
        except (AssertionError, NotImplementedError, RanksTimeoutError) as error:
            print(f"Not yet: {error}")
        except Exception:
            print("Not yet: it raises an error.")
            raise
        else:
            print("Right.")

    return run
