"""Look at one step and predict it: recorder, timeline, slow link, cost model, benchmarks."""

from labkit.lazy import offer

__getattr__, __all__ = offer(
    __name__,
    {
        "recording": ["Recorder", "Recording", "merge"],
        "timeline": ["draw_together", "save_trace"],
        "slow_link": ["SlowLink"],
        "cost_model": [
            "Backward",
            "Link",
            "Measurement",
            "backward_of",
            "fit",
            "hierarchical_seconds",
            "lower_limit",
            "measure_all_reduce",
            "ring",
            "simulate",
            "tree",
        ],
    },
)
