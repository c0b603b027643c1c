"""One style for every figure: legible on a phone, sharp on a dense screen, distinct colors."""

import matplotlib.pyplot as plt

# Okabe and Ito's palette, which keeps its colors apart for color-blind readers.
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
TRUTH = "#222222"
WRONG = "#D55E00"


def use() -> None:
    """Set the book's style for the figures of this notebook."""
    # Not every machine that draws has it.
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    set_matplotlib_formats("retina")
    plt.rcParams.update(
        {
            "figure.figsize": (6.4, 3.6),
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "legend.frameon": False,
        }
    )
