"""What a run is to do: the request, the memory budget, the batches, and the dry run."""
