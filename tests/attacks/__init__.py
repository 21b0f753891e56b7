"""What strangers try on a server, and what it must do about it."""
