"""The small models and data sets of the forum threads, and CUDA's random numbers on a CPU."""
