"""Memory and traffic in a browser: keys and choices change it to what its logic computes."""

import re

import pytest
from figures.test_memory_and_traffic_of_torch import shown

NAME = "memory_and_traffic"
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


def stated_bytes(text: str) -> tuple[float, float]:
    """The bytes kept and sent that the figure states, to three digits."""
    kept = re.search(r"keeps ([\d.]+) (\w+)", text)
    sent = re.search(r"sends ([\d.]+) (\w+)", text)
    return tuple(float(found[1]) * UNITS[found[2]] for found in (kept, sent))


def wanted_bytes(strategy: str, **changed: object):
    found = shown(strategy, **{"shardRanks": 8, "every": 16, **changed})
    return pytest.approx(tuple(one["total"] for one in found), rel=5e-3)


def test_keys_and_choices_change_the_stated_bytes(open_figure):
    opened = open_figure(NAME, "strategy=hsdp")
    opened.page.locator('input[data-key="w"]').press("ArrowRight")
    assert stated_bytes(opened.says()) == wanted_bytes("hsdp", ranks=128)
    opened.page.get_by_role("radio", name="fp32", exact=True).focus()
    opened.page.keyboard.press("Space")
    now = {"ranks": 128, "precision": "fp32"}
    assert stated_bytes(opened.says()) == wanted_bytes("hsdp", **now)
    opened.page.get_by_text("More choices").press("Enter")
    free = opened.page.get_by_role("switch", name="Sharded: free the weights after forward")
    free.press("Space")
    now["freeWeights"] = False
    assert stated_bytes(opened.says()) == wanted_bytes("hsdp", **now)
    opened.page.get_by_label("Explain").select_option("local")
    assert stated_bytes(opened.says()) == wanted_bytes("local", **now)


def test_a_shard_group_is_no_larger_than_the_ranks_there_are(open_figure):
    opened = open_figure(NAME, "strategy=hsdp&group=64&w=4")
    assert stated_bytes(opened.says()) == wanted_bytes("hsdp", ranks=4, shardRanks=4)
