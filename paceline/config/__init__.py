"""What the user asked for: `schema` says what can be asked, `load` reads it, strictly."""
