"""What happens if two ranks call different collectives: a model of gloo without processes.

    run = pair_up([Call("all_reduce", "a1"), Call("all_reduce", "b1")], [Call("all_reduce", "b1")])
    run.end                            # "hang"
    [pair.outcome for pair in run.pairs]   # ["mixed", "hang"]

One rule decides everything: **the n-th call of one rank pairs with the n-th call of the other.**
Names play no part, because no message contains them. What follows for a pair was measured on gloo
with two CPU ranks and torch 2.13 (a test measures it again). NCCL was not run; its user guide calls
the behavior undefined if counts or dtypes differ.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

QueuedOp = Literal["all_reduce", "broadcast", "barrier"]
Dtype = Literal["float32", "float16", "bfloat16"]
PairOutcome = Literal["right", "mixed", "garbled", "hang", "mismatch", "error", "unreached"]

BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
# a1 is the gradient of parameter a in step 1: another step brings another tensor. Rank 1's numbers
# are ten times those of rank 0, so that a sum shows its two terms: 21 = 1 + 20.
VALUES = {"a1": 1, "b1": 2, "a2": 3, "b2": 4, "a3": 5, "b3": 6, "c": 7, "w": 9}


class Call(NamedTuple):
    """One collective, as one rank calls it.

    op: all-reduces sum; a broadcast is from rank 0; a barrier has no tensor.
    name: a key of `VALUES`, which gives the value of each element on rank 0.
    length: elements, at least 1.
    """

    op: QueuedOp
    name: str = ""
    length: int = 2
    dtype: Dtype = "float32"

    @property
    def nbytes(self) -> int:
        return 0 if self.op == "barrier" else self.length * BYTES[self.dtype]

    def value(self, rank: int) -> int:
        """Each element of the tensor that `rank` passes in; 0 for a barrier."""
        return VALUES[self.name] * 10**rank if self.op != "barrier" else 0


class Pair(NamedTuple):
    """What became of the n-th call of both ranks.

    outcome:
        "right"     the same tensor on both ranks.
        "mixed"     two different tensors of one length and dtype, combined without an error.
        "garbled"   no error, and at least one rank has numbers that mean nothing.
        "hang"      at least one rank waits until its timeout.
        "mismatch"  at least one rank never returns: it waits, or gloo aborts its process.
        "error"     a RuntimeError on both ranks.
        "unreached" the run has stopped before.
    results: per rank, each element after the call; None if there is no such number to state.
    """

    outcome: PairOutcome
    results: tuple[int | None, int | None] = (None, None)


class PairedRun(NamedTuple):
    """`pairs[n]` is what became of the n-th calls; `end` is how the whole run ended.

    end: the outcome of the call at which the run stopped. If it ran to the end, "wrong" if any pair
    was mixed or garbled, otherwise "right".
    """

    pairs: tuple[Pair, ...]
    end: Literal["right", "wrong", "hang", "mismatch", "error"]


def pair_up(first: Sequence[Call], second: Sequence[Call], detail: bool = False) -> PairedRun:
    """Run the queues of ranks 0 and 1.

    detail: with TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares operation, shape, and dtype before
    each call. It cannot see names. A missing call remains a hang; at the timeout, the error names
    the rank that did not answer.
    """
    pairs: list[Pair] = []
    stopped: PairOutcome | None = None
    for position in range(max(len(first), len(second))):
        if stopped:
            pairs.append(Pair("unreached"))
            continue
        if position < min(len(first), len(second)):
            pairs.append(outcome_of(first[position], second[position], detail))
        else:
            pairs.append(Pair("hang"))
        if pairs[-1].outcome in ("hang", "mismatch", "error"):
            stopped = pairs[-1].outcome
    silent = any(one.outcome in ("mixed", "garbled") for one in pairs)
    return PairedRun(tuple(pairs), stopped or ("wrong" if silent else "right"))


def outcome_of(here: Call, there: Call, detail: bool = False) -> Pair:
    """What becomes of one pair: `here` is rank 0's call and `there` rank 1's."""
    same_kind = (here.op, here.nbytes, here.dtype) == (there.op, there.nbytes, there.dtype)
    if here.op == there.op == "barrier":
        return Pair("right", (0, 0))
    if detail and not same_kind:
        return Pair("error")
    if here.op != there.op:
        return Pair("hang")
    if same_kind:
        mine, other = here.value(0), there.value(1)
        results = (mine + other,) * 2 if here.op == "all_reduce" else (mine, mine)
        return Pair("right" if here.name == there.name else "mixed", results)
    if here.op == "broadcast":
        # The receiver keeps what it had behind a shorter message; a longer one aborts it.
        fits = here.nbytes <= there.nbytes
        return Pair("garbled", (here.value(0), None)) if fits else Pair("mismatch")
    if here.nbytes == there.nbytes and BYTES[here.dtype] == BYTES[there.dtype]:
        return Pair("garbled")  # each rank reads the other's bits in its own format
    return Pair("mismatch")
