"""Texts: prompts to token ids, and token ids to the text of an answer.
See journey 4 of docs/architecture.md."""
