"""The relay's part of the benchmarks: a filled outbox, the command that publishes it, and the other end."""
