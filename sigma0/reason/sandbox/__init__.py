"""Where strangers' code is run: bubblewrap, a filter of system calls, and limits watched from outside."""
