"""From files to batches.

`rows` reads, `formats` says what a row means, `chat` renders and marks targets, `encode` and `tokens` make and keep
token ids, `corpus` cuts them into samples, `packing` and `sampler` make optimizer steps of these, `preview` shows them.
"""
