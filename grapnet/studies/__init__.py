"""Studies: one file for each table or audit of the paper, with settings, a fast version and one
JSON.
"""
