"""What the user sees: the terminal, a file, and JSON.

It reads the journals through `facts`, has `explain` judge them, and is the end of every fact's way.
"""
