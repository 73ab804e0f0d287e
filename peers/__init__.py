"""What ``bench`` compares with: one file a peer, found by listing the folder; ``portkern/peer.py`` is the contract.

These files know op names, as ``kernels/`` does. They copy nothing of a peer: they call its public functions, which are
imported when the peer is asked for. Files that start with ``_`` hold what several of them share.
"""
