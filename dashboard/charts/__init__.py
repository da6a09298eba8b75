"""Pure functions from data to figures."""
