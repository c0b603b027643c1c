"""The life of the command: it starts the observers in each process, and the watcher beside them.

No fact passes through here: the watcher has `report` read the journals that `observe` wrote.
"""
