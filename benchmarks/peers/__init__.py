"""One program for each peer, run by benchmarks/bench_peers.py under that peer's own Python and packages.

They import the standard library, torch and their peer, and nothing of ours but `common`.
"""
