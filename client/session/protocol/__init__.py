"""The client half of the protocol, pure: frames and times go in, frames and results come out."""
