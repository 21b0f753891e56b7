"""The HTTP server. One process speaks HTTP and tokenises, another runs the engine; messages.py defines everything that
passes between them."""
