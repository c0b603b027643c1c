"""What is known of a run: journals, merged over the ranks, and how tensors and places become facts.

Observers write them, `explain` and `report` read them; nothing here imports another room.
"""
