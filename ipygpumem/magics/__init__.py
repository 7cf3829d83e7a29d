"""The commands, one file each: their declarations and their code."""
