"""Weeks of training: what fails, what that costs, and what would help."""
