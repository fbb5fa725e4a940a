"""The HTTP side towards clients."""
