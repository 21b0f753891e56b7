"""Work on what clients sent that may take long: each piece in a process of its own, that can be killed."""
