"""Course assignments: released as notebooks, handed in as notebooks, graded by nbval."""
