"""All groups of all jobs: frames in, frames out.

Pure: no socket, thread or clock. `Dispatcher` is the entry point.
"""
