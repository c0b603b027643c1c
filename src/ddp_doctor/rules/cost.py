"""…"""
RULES = ()
