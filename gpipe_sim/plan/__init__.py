"""Everything that was chosen, and the program of actions and messages that it compiles to."""
