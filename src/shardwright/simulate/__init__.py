"""A step without devices: fake tensors, the rehearsal, and the time that its trace takes on a machine."""
