"""Where text becomes tokens and tokens become text: the engine between them sees integers only."""
