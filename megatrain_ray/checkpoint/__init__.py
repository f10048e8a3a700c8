"""Hugging Face model directories in and out, one layer at a time."""
