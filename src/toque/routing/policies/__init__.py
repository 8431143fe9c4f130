"""Which replica a request goes to: pure functions, one policy per file."""
