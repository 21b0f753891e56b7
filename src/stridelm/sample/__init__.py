"""From logits to tokens: parameters as tensors, exact processors, position-keyed noise."""
