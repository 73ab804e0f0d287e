"""A stand-in for Liger-Kernel: its functions' names, parameters and habits, computed by torch."""
