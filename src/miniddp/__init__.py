"""Data parallelism from scratch, to be read: how the gradients of many processes become one."""
