"""The forward pass: device state, batch building, and the runner."""
