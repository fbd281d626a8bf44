"""DFlash: a block of tokens from one pass of a head that reads the target's states."""
