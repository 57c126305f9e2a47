"""What is stated: layouts, sites and edges, meshes, clusters, plans. Pure data; no tensor, no process group."""
