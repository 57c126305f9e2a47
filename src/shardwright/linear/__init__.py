"""The grid linear: a matrix product on a mesh, one autograd node for each site."""
