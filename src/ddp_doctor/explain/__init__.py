"""From facts to findings: the equation of a step, the rules, and what a certificate overrules.

Pure functions of the merged facts of a run; they return findings, which `report` prints.
"""
