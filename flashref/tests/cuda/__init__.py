"""The GPU ladder: in Numba's simulator, in the emulator, as PTX, and on a card if there is one."""
