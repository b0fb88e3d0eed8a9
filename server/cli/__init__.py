"""What people call: `status` and `check`, and the lines that the server logs."""
