"""A simulator of decode steps that plans with the server's own policy code."""
