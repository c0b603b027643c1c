"""From facts to findings: what a run's steps measured, the rules, and what a certificate answers.

Pure functions of the merged facts of a run; they return findings, which `report` prints.
"""
