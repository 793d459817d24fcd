"""An agent that edits a repository and escalates when it is stuck."""
