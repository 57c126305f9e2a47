"""What is searched: the structures of a model on a mesh, and what was asked."""
