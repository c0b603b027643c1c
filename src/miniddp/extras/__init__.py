"""What the core does not need and what works on it alone: comm hooks, the bucket planner."""
