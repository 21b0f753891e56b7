"""Work on clients' input that may take long: each piece runs in a process of its own, which can be killed."""
