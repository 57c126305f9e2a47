"""Files that people write: read, checked against a schema, and refused in one line that names the field."""
