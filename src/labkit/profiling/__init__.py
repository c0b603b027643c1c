"""Look at one step and predict it: recorder, timeline, slow link, cost model."""

from labkit.lazy import offer

__getattr__, __all__ = offer(
    __name__,
    {
        "recording": ["Recorder", "merge"],
        "timeline": ["draw_together"],
        "slow_link": ["SlowLink"],
        "cost_model": ["Link", "backward_of", "ring", "simulate"],
    },
)
