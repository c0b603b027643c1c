"""What chapters run: small models and data of the forum threads, losses to judge, the museum.

Most modules belong to one chapter, which imports them by name: no name is used everywhere.
"""
