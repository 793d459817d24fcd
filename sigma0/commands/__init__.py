"""The commands of `sigma0`, a file each, and the console they write to."""
