"""An engine whose model runs in several processes: what goes to them, what they do with it, what
comes back."""
