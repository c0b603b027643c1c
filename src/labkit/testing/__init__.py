"""Check an implementation of data parallelism: comparisons, invariants, and known broken ones."""

from labkit.lazy import offer

__getattr__, __all__ = offer(
    __name__,
    {
        "compare": ["Comparison", "flatten", "gradients", "largest_difference", "ratio_and_cosine"],
        "agreement": [
            "InvariantError",
            "assert_gradients_agree",
            "assert_gradients_equal",
            "assert_replicas_agree",
        ],
        "invariants": ["INVARIANTS", "violations"],
        "watch": ["RecordedCollectives", "SameCollectives"],
        "verdict": ["gradient_of", "verdict_figure", "verdict_table", "verdicts"],
    },
)
