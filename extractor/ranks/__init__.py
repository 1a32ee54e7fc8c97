"""The ranks of a run: who is who, how they talk, who has died, and signals."""
