"""Seeing what it decides: metrics, the live view and the report of a trace."""
