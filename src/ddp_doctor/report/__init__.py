"""What the user sees: the terminal, a file, JSON, and JUnit XML.

It reads the journals through `facts`, has `explain` judge them, and is the end of every fact's way.
"""
