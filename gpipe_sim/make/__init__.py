"""From a scenario to a plan: cut, placed and ordered; and plans as files."""
