"""What the chapters, labs and tests stand on: ranks in a notebook, comparisons, tables."""
