"""Bench: runs the benchmarks on a quiet machine, keeps what they found, and writes the tables and plots of their pages.

scripts/bench                    all, one after the other
scripts/bench layer fan_in       some
scripts/bench --pages            only the pages, from what is kept
"""
