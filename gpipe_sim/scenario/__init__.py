"""What a person asks: the sections of a scenario file, and how it is read."""
