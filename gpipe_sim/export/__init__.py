"""Plans in the words of other tools."""
