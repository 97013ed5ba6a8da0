"""What runs work at a site: one narrow port, one conformance suite; this machine's processes, and a fake that is product code."""
