"""Small models and data sets that several chapters or labs share.

What only one chapter uses is in a module beside that chapter.
"""
