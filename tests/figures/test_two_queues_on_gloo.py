"""What the figure of two queues says, against gloo: two real ranks make the calls."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from figures.node import call

from labkit.launch import RanksError, RanksTimeoutError, run_ranks

Queue = list[dict[str, Any]]
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def queues_of(*texts: str) -> list[Queue]:
    """As the figure reads them from an address: "ra12f.s" is an all-reduce of a1 and a barrier."""
    return call("two_queues", "parse", [(text,) for text in texts])


def pair_up(first: str, second: str, detail: bool = False) -> dict[str, Any]:
    """What the figure says that becomes of these two queues."""
    [run] = call("two_queues", "pairUp", [(*queues_of(first, second), detail)])
    return run


def make_calls(rank: int, queues: list[Queue], values: list[list[float]]) -> list[list[float]]:
    """Make this rank's calls, each with a tensor of its value; each tensor afterwards."""
    after = []
    for one, value in zip(queues[rank], values[rank], strict=True):
        tensor = torch.full((one["length"],), value, dtype=getattr(torch, one["dtype"]))
        launch(one["op"], tensor, None)
        after.append(tensor.tolist())
    return after


def launch(op: str, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    if op == "all_reduce":
        dist.all_reduce(tensor, group=group)
    elif op == "broadcast":
        dist.broadcast(tensor, src=0, group=group)
    else:
        dist.barrier(group=group)


def made(first: str, second: str, **options: Any) -> list[list[list[float]]]:
    """By rank, the tensors after two real ranks made the calls of these queues."""
    return run_ranks(make_calls, 2, *with_values(first, second), device="cpu", **options)


def with_values(*texts: str) -> tuple[list[Queue], list[list[float]]]:
    queues = queues_of(*texts)
    return queues, [
        call("two_queues", "value", [(one, rank) for one in queue]) if queue else []
        for rank, queue in enumerate(queues)
    ]


FINISHES = ("ra12f.ra12f.rb13f.rc4b.bw2f.ba12f.s", "ra12f.rb12f.rb23f.rb24b.bw2f.bb12f.s")


def test_every_pair_that_the_figure_lets_pass_gives_these_numbers_on_gloo() -> None:
    pairs = pair_up(*FINISHES)["pairs"]
    outcomes = ["right", "mixed", "mixed", "mixed", "right", "mixed", "right"]
    assert [pair["outcome"] for pair in pairs] == outcomes
    for rank, after in enumerate(made(*FINISHES)):
        for pair, elements in zip(pairs, after, strict=True):
            assert set(elements) <= {pair["results"][rank]}


GARBLES = ("ra12h.ba12f.ba14h", "ra12b.bb13f.ba12f")


def test_a_garbled_pair_passes_without_an_error_and_a_rank_has_neither_sum_nor_copy() -> None:
    pairs = pair_up(*GARBLES)["pairs"]
    assert [pair["outcome"] for pair in pairs] == ["garbled"] * 3
    here, there = made(*GARBLES)
    for pair, mine, theirs, right in zip(pairs, here, there, (11, 1, 1), strict=True):
        assert set(theirs) != {right}
        if pair["results"][0] is not None:
            assert set(mine) == {pair["results"][0]}


HANGS = {
    "one call too few": ("ra12f.rb12f", "ra12f"),
    "another operation": ("ra12f", "ba12f"),
    "a barrier against an all-reduce": ("ra12f.s", "s.ra12f"),
    "a broadcast that no rank receives": ("bw2f", ""),
}


@pytest.mark.parametrize("name", HANGS)
def test_where_the_figure_hangs_a_rank_waits_in_that_collective(name: str) -> None:
    assert pair_up(*HANGS[name])["end"] == "hang"
    with pytest.raises(RanksTimeoutError, match="waits in"):
        made(*HANGS[name], stuck_after=0.3)


MISMATCHES = {
    "lengths": ("ra12f", "rc3f"),
    "lengths, the other way round": ("rc3f", "ra12f"),
    "many more elements": ("ra11f", "ra19f"),
    "dtypes of different size": ("ra12f", "ra12h"),
    "as many bytes, in elements of different size": ("ra12f", "ra14h"),
    "a longer broadcast than its receiver": ("bc3f", "ba12f"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_after_a_mismatch_at_least_one_rank_waits_or_is_aborted(name: str) -> None:
    assert pair_up(*MISMATCHES[name])["end"] == "mismatch"
    with pytest.raises((RanksError, RuntimeError)) as caught:
        made(*MISMATCHES[name], stuck_after=0.3)
    assert "collectives on ranks" not in str(caught.value)


def errors(rank: int, queues: list[Queue], values: list[list[float]]) -> list[str]:
    """What DETAIL says of each pair, tried in process groups of their own."""
    said = []
    for one, value in zip(queues[rank], values[rank], strict=True):
        group = dist.new_group([0, 1])
        tensor = torch.full((one["length"],), value, dtype=getattr(torch, one["dtype"]))
        try:
            launch(one["op"], tensor, group)
            said.append("no error")
        except RuntimeError as error:
            said.append(str(error).split(" on ranks")[0])
    return said


def test_detail_reports_every_difference_but_that_of_the_names() -> None:
    pairs = [("ra12f", "ba12f"), ("ra12f", "s"), *MISMATCHES.values()]
    for queues in (FINISHES, GARBLES):
        pairs += zip(*(text.removesuffix(".s").split(".") for text in queues), strict=True)
    outcomes = [pair_up(*pair, detail=True)["end"] for pair in pairs]
    assert set(outcomes) == {"right", "wrong", "error"}
    said = {"error": "Detected mismatch between collectives"}
    wanted = [said.get(outcome, "no error") for outcome in outcomes]
    both = with_values(*(".".join(queue) for queue in zip(*pairs, strict=True)))
    assert run_ranks(errors, 2, *both, device="cpu", env=DETAIL) == [wanted, wanted]


def test_what_is_not_a_call_is_left_out_of_a_queue_and_the_rest_is_written_unchanged() -> None:
    queues = queues_of("ra12f.xa12f.rz2f.ra10f.ra12x.ra122f..<b>.s.bw3h", "rb34b.s.bc9f.ra21h")
    written = call("two_queues", "write", [(queue,) for queue in queues])
    assert written == ["ra12f.s.bw3h", "rb34b.s.bc9f.ra21h"]


def test_each_preset_of_the_figure_ends_as_its_name_says() -> None:
    [presets] = call("two_queues", "presets", [()])
    runs = {name: pair_up(*texts) for name, *texts in presets}
    ends = {name: (run["end"], [p["outcome"] for p in run["pairs"]]) for name, run in runs.items()}
    assert ends == {
        "a gradient is missing": ("hang", ["mixed"] * 3 + ["hang"] + ["unreached"] * 2),
        "one head per rank": ("wrong", ["mixed"] * 2),
        "another order": ("wrong", ["mixed", "mixed", "right"]),
        "another size": ("mismatch", ["mismatch", "unreached"]),
        "one batch more": ("hang", ["right", "right", "hang", "unreached"]),
        "rank 0 evaluates": ("hang", ["right", "right", "hang", "unreached"]),
        "fp16 and bf16": ("wrong", ["garbled"] * 2),
        "all right": ("right", ["right"] * 6),
    }
