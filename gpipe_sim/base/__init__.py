"""What everything else stands on: units, limits, files and array types."""
