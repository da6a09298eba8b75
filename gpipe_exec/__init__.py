"""Execute a plan for real, with torch: not built yet."""
