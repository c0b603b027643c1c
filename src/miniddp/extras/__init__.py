"""Comm hooks, which torch's DDP accepts too, and the bucket planner. `torch_drop_in` uses both."""
