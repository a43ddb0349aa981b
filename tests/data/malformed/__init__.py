"""A corpus of malformed and odd inputs, each with its exact complaint or the exact rows that it gives."""
