"""The server without I/O: receives frames for all groups of all jobs, and returns frames.

Pure: no socket, thread or clock. `Dispatcher` is the entry point.
"""
