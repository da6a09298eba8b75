"""The page: what it shows, and what happens when something on it changes."""
