"""The whole job on this machine: a small Llama, rehearsed in several layouts, trained in the one that sends least."""
