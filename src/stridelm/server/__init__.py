"""The HTTP border. One process speaks HTTP and tokenises, another runs the engine; messages.py is all that passes
between them."""
