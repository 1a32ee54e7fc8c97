"""What is to be done: the request, its batches under their budgets, and the dry run."""
