"""Results for people: colours, traces, tables and charts in the terminal."""
