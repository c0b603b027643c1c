"""The museum's exhibits, trained under the doctor: the book's table says what it finds."""

import re
from collections.abc import Callable

import pytest
from doctor.harness.runs import Server
from doctor.harness.scripts import Script

from labkit.launch import project_root
from labkit.testing import museum

PAGE = project_root() / "book" / "reference" / "public_programs.md"
ROW = re.compile(r"^\| `(\w+)` \| (?:`(\w+)`|—) \|", re.MULTILINE)

# What makes a bug act, where two ranks with one micro-batch of four samples each do not.
SITUATIONS = {
    "buffer_used_in_flight": "slow = late_collectives(check=False); slow.__enter__()",
    "clip_before_sync": "clip = 0.5",
    "clip_by_own_piece": "clip = 0.5",
    "earlier_pieces_lost": "accumulate = 2",
    "last_forward_unsynced": "accumulate = 2",
    "last_micro_batch_only": "accumulate = 2",
    "launch_when_locally_ready": "takes = [('a', 'b', 'c'), ('b', 'a', 'c')]",
    "local_denominator": "uneven = True",
    "no_initial_broadcast": "seed = rank",
    "none_skipped": "takes = [('a', 'c'), ('b', 'c')]",
    "stale_ready_count": "fails = True",
}
RANKS = {"divided_by_one_replica": 4, "whole_vector_ring": 3}
TRAINER = """
from datetime import timedelta
import torch, torch.distributed as dist
from labkit.testing import museum, trial
from labkit.testing.watch import late_collectives
dist.init_process_group("gloo", timeout=timedelta(seconds=15))
rank, world = dist.get_rank(), dist.get_world_size()
accumulate, uneven, takes, clip, seed, fails = 1, False, None, None, 0, False
{situation}
exhibit = next(each for each in museum.exhibits() if each.name == "{name}")
module = trial.SmallModule(seed=seed)
wrapped = exhibit.wrap(module)
optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
for step in range(4):
    batches = trial.draw_batches(world, accumulate, uneven, seed=step)
    if takes:
        batches = [[one._replace(take=takes[r]) for one in of] for r, of in enumerate(batches)]
    if fails and step == 1:
        module.fails_in = "backward"
        try:
            trial.step(wrapped, module, batches, rank, clip)
        except trial.InterruptedPassError:
            pass
        module.fails_in = None
        optimizer.zero_grad()
    trial.step(wrapped, module, batches, rank, clip)
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""


def table() -> dict[str, str | None]:
    """What the page says: for each exhibit a code, or None where the doctor is silent."""
    return {name: code or None for name, code in ROW.findall(PAGE.read_text())}


def test_the_table_has_every_exhibit() -> None:
    assert sorted(table()) == sorted(each.name for each in museum.exhibits())


@pytest.mark.parametrize("name", sorted(each.name for each in museum.exhibits()))
def test_the_doctor_says_of_an_exhibit_what_the_page_says(
    server: Server, script: Callable[..., Script], name: str
) -> None:
    text = TRAINER.format(name=name, situation=SITUATIONS.get(name, ""))
    outcome = server.run(script(text, ranks=RANKS.get(name, 2)), doctor=True)
    assert outcome.report is not None, outcome.errors
    findings = {one["code"]: one["severity"] for one in outcome.report["findings"]}
    expected = table()[name]
    if expected:
        assert expected in findings, outcome.errors
    else:
        assert set(findings.values()) <= {"note"}, outcome.errors
