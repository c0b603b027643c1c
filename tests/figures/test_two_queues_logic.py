"""The figure of two queues says what `figures.two_queues` says, which gloo confirms."""

import random
from collections import Counter
from typing import Any

from figures.node import call
from figures.two_queues import VALUES, Call, PairedRun, pair_up

LETTERS = {"all_reduce": "r", "broadcast": "b", "float32": "f", "float16": "h", "bfloat16": "b"}


def written(queue: list[Call]) -> str:
    """A queue as it stands in the address of a page."""
    return ".".join(
        "s"
        if one.op == "barrier"
        else f"{LETTERS[one.op]}{one.name}{one.length}{LETTERS[one.dtype]}"
        for one in queue
    )


def as_json(queue: list[Call]) -> list[dict[str, Any]]:
    return [{**one._asdict(), "length": one.length} for one in queue]


def some_call(draw: random.Random) -> Call:
    op = draw.choice(["all_reduce", "all_reduce", "all_reduce", "broadcast", "barrier"])
    if op == "barrier":
        return Call(op, "", 0)
    # Few lengths and names, so that pairs often agree in one and differ in another.
    dtype = draw.choice(["float32", "float32", "float16", "bfloat16"])
    return Call(op, draw.choice(["a1", "b1", "c", "w"]), draw.choice([2, 2, 3, 4]), dtype)


def some_queues(draw: random.Random) -> tuple[list[Call], list[Call]]:
    """A queue and a copy with up to three calls changed, removed, added, or exchanged."""
    first = [some_call(draw) for _ in range(draw.randint(0, 8))]
    second = list(first)
    for _ in range(draw.randint(0, 3)):
        place = draw.randrange(len(second) + 1)
        change = draw.choice(["insert", "remove", "replace", "exchange", "rename", "cast"])
        if change == "insert":
            second.insert(place, some_call(draw))
        elif place < len(second):
            if change == "remove":
                del second[place]
            elif change == "replace":
                second[place] = some_call(draw)
            elif change == "rename" and second[place].op != "barrier":
                second[place] = second[place]._replace(name=draw.choice([*VALUES]))
            elif change == "cast" and second[place].op != "barrier":
                dtype = draw.choice(["float32", "float16", "bfloat16"])
                second[place] = second[place]._replace(dtype=dtype)
            elif change == "exchange" and place:
                second[place - 1], second[place] = second[place], second[place - 1]
    return first, second


def as_figure(run: PairedRun) -> dict[str, Any]:
    pairs = [{"outcome": one.outcome, "results": list(one.results)} for one in run.pairs]
    return {"pairs": pairs, "end": run.end}


def test_1000_random_pairs_of_queues_end_as_the_python_model_says() -> None:
    draw = random.Random(30)
    cases = [(*some_queues(draw), draw.random() < 0.3) for _ in range(1000)]
    found = call("two_queues", "pairUp", [(as_json(a), as_json(b), d) for a, b, d in cases])
    seen: Counter[str] = Counter()
    for (first, second, detail), one in zip(cases, found, strict=True):
        run = pair_up(first, second, detail)
        assert one == as_figure(run), (first, second, detail)
        seen.update(pair.outcome for pair in run.pairs)
    assert min(seen[o] for o in ("right", "mixed", "garbled", "hang", "mismatch", "error")) > 20


def test_a_queue_in_the_address_is_read_and_written_back_unchanged() -> None:
    draw = random.Random(31)
    queues = [some_queues(draw)[0] for _ in range(200)]
    read = call("two_queues", "parse", [(written(queue),) for queue in queues])
    assert read == [as_json(queue) for queue in queues]
    back = call("two_queues", "write", [(queue,) for queue in read])
    assert back == [written(queue) for queue in queues]


def test_what_is_not_a_call_is_left_out_of_a_queue_from_the_address() -> None:
    text = "ra12f.xa12f.rz2f.ra10f.ra12x.ra122f..<b>.s.bw3h"
    assert call("two_queues", "write", [(call("two_queues", "parse", [(text,)])[0],)]) == [
        "ra12f.s.bw3h"
    ]


def test_the_numbers_of_the_figure_are_those_of_the_model() -> None:
    calls = [Call("all_reduce", name) for name in VALUES]
    for rank in (0, 1):
        found = call("two_queues", "value", [(one._asdict(), rank) for one in calls])
        assert found == [one.value(rank) for one in calls]


def test_each_preset_of_the_figure_ends_as_its_name_says() -> None:
    [presets] = call("two_queues", "presets", [()])
    queues = call("two_queues", "parse", [(text,) for _, *texts in presets for text in texts])
    ends = {}
    for number, (name, *_) in enumerate(presets):
        first, second = ([Call(**one) for one in queues[2 * number + rank]] for rank in (0, 1))
        run = pair_up(first, second)
        ends[name] = (run.end, [pair.outcome for pair in run.pairs])
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
