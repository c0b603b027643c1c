"""The bucket timeline in a browser: keys, sliders, and what it says, against Python's numbers."""

from labkit.profiling.cost_model import Link
from labkit.profiling.sweeps import backward_like, limit_of_ring, simulate_ring
from labkit.scenarios.toy_steps import small_transformer
from miniddp.buckets import MIB, ParameterSize, arrival_plan

NAME = "bucket_timeline"
SIZES = [one.nbytes for one in reversed(list(small_transformer().model.parameters()))]


def predicted(cap_mib: float, ranks: int, gbit: float) -> list[str]:
    """What the figure has to say of the assumed model, in milliseconds."""
    backward, link = backward_like(SIZES, 0.080, 0.160), Link.of(gbit, latency_us=50)
    sizes = [ParameterSize(one, "float32") for one in SIZES]
    plan = arrival_plan(sizes, range(len(sizes)), [int(cap_mib * MIB)])
    step = simulate_ring(backward, plan, link, ranks)
    limit = limit_of_ring(backward, link, ranks)
    return [f"{1e3 * seconds:.1f} ms" for seconds in (step.end, step.exposed, limit)]


def test_a_state_from_the_address_and_keys_on_the_sliders_change_the_prediction(open_figure):
    opened = open_figure(NAME, "model=assumed&cap=4&w=8&gbit=0.5")
    assert all(number in opened.says() for number in predicted(4, 8, 0.5))
    cap, bandwidth, ranks = (
        opened.page.locator(f'input[data-key="{key}"]') for key in ("cap", "gbit", "w")
    )
    cap.focus()
    cap.press("ArrowRight")  # 8 MiB
    assert all(number in opened.says() for number in predicted(8, 8, 0.5))
    bandwidth.press("ArrowRight")  # 1 Gbit/s
    assert all(number in opened.says() for number in predicted(8, 8, 1))
    ranks.press("End")
    assert all(number in opened.says() for number in predicted(8, 1024, 1))
    opened.page.wait_for_function("location.hash.includes('cap=8')")


def test_the_recorded_steps_are_reached_by_keyboard_and_leave_when_the_choices_do(open_figure):
    opened = open_figure(NAME)
    assert "Recorded:" in opened.says()
    preset = opened.page.get_by_role("button", name="torch's caps")
    preset.focus()
    preset.press("Enter")
    assert preset.get_attribute("aria-pressed") == "true"
    assert "Recorded: torch's DDP" in opened.page.locator(".figure-drawing").text_content()
    opened.page.locator('input[data-key="w"]').press("ArrowRight")
    assert "Recorded" not in opened.says()
    assert "Recorded: " not in opened.page.locator(".figure-drawing").text_content()
    opened.page.get_by_role("button", name="Reset").press("Enter")
    assert "Recorded:" in opened.says()
