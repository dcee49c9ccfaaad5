"""The binaries: one absl program per paper, `reproduce` that runs them all, and the report."""
