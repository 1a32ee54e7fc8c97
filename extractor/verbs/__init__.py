"""The commands of the program that are not a run."""
