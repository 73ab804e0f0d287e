"""The ops: one file per op or close family. Nothing here knows a vendor or an architecture."""
