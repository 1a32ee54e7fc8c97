"""The ranks of a run: their places, how they talk to each other, how they find dead ranks, signals."""
