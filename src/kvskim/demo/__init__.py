"""The demo: a small real model reads a long document on a CPU and answers questions, with full attention and with kvskim."""
