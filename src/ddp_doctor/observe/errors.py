"""An exception of the user's run, as the journal keeps it."""

import os

from ddp_doctor.facts.places import is_users
from ddp_doctor.facts.types import ErrorFact


def described(error: BaseException) -> ErrorFact:
    """Type, message, and the user's innermost line."""
    where = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if is_users(name):
            shown = os.path.relpath(name)
            where = f"{name if shown.startswith('..') else shown}:{trace.tb_lineno}"
        trace = trace.tb_next
    return {"type": type(error).__name__, "text": str(error)[:2000], "place": where}
