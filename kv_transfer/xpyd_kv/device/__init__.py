"""KV memory as bytes. The only place of this package that knows torch."""
