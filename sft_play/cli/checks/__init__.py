"""What `make doctor` looks at: one module a group, each a function that yields findings."""
