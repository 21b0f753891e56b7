"""Several HTTP processes for one engine: parent.py starts them and hands connections to them, frontend.py is one."""
