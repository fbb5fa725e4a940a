"""One inference request from its parsed body to its last byte: attempts, relay, answers."""
