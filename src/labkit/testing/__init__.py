"""Check an implementation of data parallelism: comparisons, invariants, known broken examples."""

from labkit.lazy import offer

__getattr__, __all__ = offer(
    __name__,
    {
        "compare": [
            *("flatten", "gradients", "largest_difference", "ratio_and_cosine"),
            *("gradient_of", "moved", "verdicts", "weights"),
        ],
        "agreement": ["InvariantError", "assert_gradients_agree", "assert_replicas_agree"],
        "invariants": ["INVARIANTS", "gradients_are_identical", "violations"],
        "watch": ["RecordedCollectives", "SameCollectives"],
        "variants": ["Held", "rows_of_ranks", "try_variants", "under_ddp"],
    },
)
