"""What the core does not need: join, strict mode, comm hooks, mixed precision, the planner."""
