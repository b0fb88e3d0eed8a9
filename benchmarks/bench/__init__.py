"""Run the benchmarks on a quiet machine, save their results, and write the tables and plots of their pages.

scripts/bench                    all, one after the other
scripts/bench layer fan_in       some
scripts/bench --pages            only the pages, from the saved results
"""
