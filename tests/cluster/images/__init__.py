"""Images for the test cluster: build.py."""
