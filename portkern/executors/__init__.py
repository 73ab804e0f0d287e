"""What consumes a Plan: one file per way to run it. A new way is a new file."""
