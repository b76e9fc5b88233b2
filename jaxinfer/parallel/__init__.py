"""Device meshes: sharding of arrays, and communication between processes."""
