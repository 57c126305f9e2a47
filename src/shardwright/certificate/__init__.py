"""The proof of a plan: it is rehearsed on a rank of each class, and compared with what was predicted."""
