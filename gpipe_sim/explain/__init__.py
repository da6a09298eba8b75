"""Why a step takes what it takes, and what to change next."""
