"""Memory and traffic in a browser: keys, choices, and what it says, against Python's numbers."""

import re

import pytest
from browser import OpenedPage
from figures.memory_and_traffic import Sharding, TrainingJob, memory, traffic

NAME = "memory_and_traffic"
START = TrainingJob(7_500_000_000, 64, precision="bf16", bucket_views=True, shard_ranks=8, every=16)
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


def said(opened: OpenedPage) -> str:
    return opened.page.locator(".figure-says").inner_text()


def stated_bytes(text: str) -> tuple[float, float]:
    """The bytes kept and sent that the figure states, to three digits."""
    kept = re.search(r"keeps ([\d.]+) (\w+)", text)
    sent = re.search(r"sends ([\d.]+) (\w+)", text)
    return tuple(float(found[1]) * UNITS[found[2]] for found in (kept, sent))


def wanted_bytes(job: TrainingJob, strategy: Sharding):
    return pytest.approx((memory(job, strategy).total, traffic(job, strategy).total), rel=5e-3)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hsdp", "local"])
def test_a_state_from_the_address_says_what_python_computes(open_figure, strategy):
    opened = open_figure(NAME, f"strategy={strategy}")
    assert stated_bytes(said(opened)) == wanted_bytes(START, strategy)
    assert opened.errors == []
    assert opened.external == []


def test_keys_and_choices_change_the_stated_bytes(open_figure):
    opened = open_figure(NAME, "strategy=hsdp")
    opened.page.locator('input[data-key="w"]').press("ArrowRight")
    job = TrainingJob(7_500_000_000, 128, precision="bf16", shard_ranks=8)
    assert stated_bytes(said(opened)) == wanted_bytes(job, "hsdp")
    opened.page.get_by_role("radio", name="fp32", exact=True).focus()
    opened.page.keyboard.press("Space")
    job = TrainingJob(7_500_000_000, 128, shard_ranks=8)
    assert stated_bytes(said(opened)) == wanted_bytes(job, "hsdp")
    opened.page.get_by_text("More choices").press("Enter")
    free = opened.page.get_by_role("switch", name="Sharded: free the weights after forward")
    free.press("Space")
    job = TrainingJob(7_500_000_000, 128, shard_ranks=8, free_weights=False)
    assert stated_bytes(said(opened)) == wanted_bytes(job, "hsdp")


def test_a_shard_group_is_no_larger_than_the_ranks_there_are(open_figure):
    opened = open_figure(NAME, "strategy=hsdp&group=64&w=4")
    job = TrainingJob(7_500_000_000, 4, precision="bf16", shard_ranks=4)
    assert stated_bytes(said(opened)) == wanted_bytes(job, "hsdp")
