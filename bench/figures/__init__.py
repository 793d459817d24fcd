"""Every figure of every text, and where it comes from."""
