"""One file per architecture; files that start with ``_`` hold what several of them share.

A new architecture is one new file here (see ``nvidia_sm90.py``), found by listing the folder.
"""
