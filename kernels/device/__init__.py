"""The jit code: what a kernel does with its tiles. The host entries that launch it lie one folder above."""
